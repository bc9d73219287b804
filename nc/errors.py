"""The exceptions a user can meet.

One tree:

    NCError
    ├── ConfigError (ValueError)          a configuration that can't be meant
    │   ├── UnknownFieldError (TypeError)     a field that does not exist
    │   ├── PatternError                      an invalid regular expression
    │   └── UnmatchedRuleError                a rule that matches no operator
    ├── UnsupportedError (ValueError)     legal, but not on this backend
    ├── InputError (ValueError)           example or call inputs that don't fit the model
    ├── CaptureError (RuntimeError)       torch.export could not capture the model
    ├── StateError (RuntimeError)         a step called out of order
    ├── CalibrationError (ValueError)     calibration data with NaN or Inf
    ├── BackendError (RuntimeError)       an engine that is missing or failed
    │   ├── UnknownBackendError               a name that nobody registered
    │   ├── BackendUnavailableError           known, but can't run here
    │   └── VerificationError                 the engine disagrees with the reference
    └── ArtefactError (ValueError)        a saved model that can't be trusted
        ├── ArtefactMissingError              a file is not there
        ├── ArtefactCorruptError              a checksum does not match
        ├── ArtefactSchemaError               written by a newer version, or not by us
        └── ArtefactOperatorError             an operator that is not on the allow-list

Every message says what was wrong, where, and what to do. Two warnings stand beside the tree: `NCWarning` for what was decided on
the user's behalf, and its subclass `UnmatchedTypeWarning` for a type rule without effect.
"""

from __future__ import annotations


class NCError(Exception):
    """Base of everything that `nc` raises on purpose."""


class ConfigError(NCError, ValueError):
    """A configuration that contradicts itself or names a value that does not exist."""


class UnknownFieldError(ConfigError, TypeError):
    """A configuration was given a field that it does not have."""


class PatternError(ConfigError):
    """A rule's key is not a valid regular expression."""


class UnmatchedRuleError(ConfigError):
    """A rule's name or pattern matches no operator of the model."""


class UnsupportedError(NCError, ValueError):
    """A legal request that the chosen backend can't run."""


class InputError(NCError, ValueError):
    """Example inputs, or inputs of a call, that don't fit the model."""


class CaptureError(NCError, RuntimeError):
    """`torch.export` could not capture the model as one graph."""


class StateError(NCError, RuntimeError):
    """A step was called out of order (convert before calibration, prepare on a converted model)."""


class CalibrationError(NCError, ValueError):
    """Calibration data held NaN or Inf."""


class BackendError(NCError, RuntimeError):
    """An engine failed."""


class UnknownBackendError(BackendError, ValueError):
    """No backend has that name."""


class BackendUnavailableError(BackendError, ImportError):
    """The backend exists but can't run on this machine."""


class VerificationError(BackendError):
    """The engine model's output is further from the reference than the backend's tolerance."""


class ArtefactError(NCError, ValueError):
    """A saved model can't be loaded."""


class ArtefactMissingError(ArtefactError, FileNotFoundError):
    """A file of the artefact is not there."""


class ArtefactCorruptError(ArtefactError):
    """A file of the artefact is truncated or altered."""


class ArtefactSchemaError(ArtefactError):
    """The artefact was written by a newer version, or is not one of ours."""


class ArtefactOperatorError(ArtefactError):
    """The artefact's graph holds an operator that is not on the allow-list."""


class NCWarning(UserWarning):
    """Something was decided on the user's behalf."""


class UnmatchedTypeWarning(NCWarning):
    """A type rule matched no operator."""
