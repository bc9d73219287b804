"""The exceptions that users can get.

One tree:

    NCError
    ├── ConfigError (ValueError)          an impossible configuration
    │   ├── UnknownFieldError (TypeError)     a field that does not exist
    │   ├── PatternError                      an invalid regular expression
    │   └── UnmatchedRuleError                a rule that matches no operator
    ├── UnsupportedError (ValueError)     valid, but not supported by this backend or CPU
    ├── InputError (ValueError)           example or call inputs that don't fit the model
    ├── CaptureError (RuntimeError)       torch.export could not capture the model
    ├── StateError (RuntimeError)         a step called in the wrong order
    │   └── NotCalibratedError                no calibration data before convert
    ├── CalibrationError (ValueError)     calibration data with NaN or Inf
    ├── BackendError (RuntimeError)       an engine that is missing or failed
    │   ├── UnknownBackendError               no backend has this name
    │   ├── BackendUnavailableError           a known backend that cannot run here
    │   └── VerificationError                 the engine disagrees with the reference
    └── ArtefactError (ValueError)        a saved model that cannot be loaded
        ├── ArtefactMissingError              a file is not there
        ├── ArtefactWriteError (OSError)      a file or folder cannot be written
        ├── ArtefactCorruptError              a checksum does not match
        ├── ArtefactSchemaError               written by a newer version, or not by nc
        └── ArtefactOperatorError             an operator that is not on the allow-list

Every message says what was wrong, where, and what to do. There are two warnings: `NCWarning` for a decision
that nc made for the user, and its subclass `UnmatchedTypeWarning` for a type rule that matches nothing.
"""

from __future__ import annotations

from nc.text.plain import plain


class NCError(Exception):
    """Base class of all errors that `nc` raises."""

    def __str__(self) -> str:
        """Return the message; names in it that could steer a terminal are escaped and shortened."""
        return plain(super().__str__())


class ConfigError(NCError, ValueError):
    """A configuration with contradicting fields or unknown values.

    The message lists the values that are allowed.
    """


class UnknownFieldError(ConfigError, TypeError):
    """A configuration has no field with this name. The message names the nearest field."""


class PatternError(ConfigError):
    """A rule's key is not a valid regular expression. Escape what is meant literally, such as dots."""


class UnmatchedRuleError(ConfigError):
    """A rule's name or pattern matches no operator of the model.

    Take one of the names in the message; `describe` lists all.
    """


class UnsupportedError(NCError, ValueError):
    """A valid request that the chosen backend or CPU does not support.

    The message names what does, another backend or another value.
    """


class InputError(NCError, ValueError):
    """Example inputs, or inputs of a call, that don't fit the model.

    Change the inputs, or capture the model again with such example inputs.
    """


class CaptureError(NCError, RuntimeError):
    """`torch.export` could not capture the model as one graph.

    Change the line of the model that the message names, or use `WeightOnlyConfig`, which captures nothing.
    """


class StateError(NCError, RuntimeError):
    """A step was called in the wrong order (convert before calibration, prepare on a converted model).

    The message says which step is missing.
    """


class NotCalibratedError(StateError):
    """A prepared model is converted, and was not called with calibration data.

    Call it with about a hundred typical inputs first.
    """


class CalibrationError(NCError, ValueError):
    """Calibration data contains NaN or Inf. The message names operator and batch: remove that input."""


class BackendError(NCError, RuntimeError):
    """An engine failed. Use another backend; report it with the message."""


class UnknownBackendError(BackendError, ValueError):
    """No backend has that name. The message lists the names."""


class BackendUnavailableError(BackendError, ImportError):
    """The backend exists but cannot run on this machine.

    Install what the message names; `python -m nc doctor` shows every backend.
    """


class VerificationError(BackendError):
    """The engine's outputs differ from the reference by more than rounding explains.

    Leave the operator that the message names in fp32, or use another backend.
    """


class ArtefactError(NCError, ValueError):
    """A saved model cannot be loaded, or a model cannot be saved.

    The message names the part of the model, or the folder that is in the way.
    """


class ArtefactMissingError(ArtefactError, FileNotFoundError):
    """A file of the artefact does not exist. Check the path, or copy the artefact again."""


class ArtefactWriteError(ArtefactError, OSError):
    """A file or folder cannot be written: the disk is full, or permission is missing.

    What was there is as it was. The message names the path.
    """


class ArtefactCorruptError(ArtefactError):
    """A file of the artefact is truncated or altered. Copy the artefact again, or save the model again."""


class ArtefactSchemaError(ArtefactError):
    """The artefact was written by a newer version, or not by nc. Install a newer version of nc."""


class ArtefactOperatorError(ArtefactError):
    """The artefact's graph contains an operator that is not on the allow-list.

    Do not load it unless you made it; then quantize the model again without that operator.
    """


class NCWarning(UserWarning):
    """nc made a decision for the user. The text says which, and how to decide otherwise."""


class UnmatchedTypeWarning(NCWarning):
    """A type rule matched no operator. Remove the rule, or correct the type."""
