"""The exceptions that users can get; those that nc has too have its names."""


class RunnerError(Exception):
    """Base class of all errors that nc_run raises."""


class ArtefactError(RunnerError, ValueError):
    """A folder cannot be loaded."""


class ArtefactMissingError(ArtefactError, FileNotFoundError):
    """A file of the folder is not there. Check the path, or copy the folder again."""


class ArtefactCorruptError(ArtefactError):
    """A file is truncated or altered, or says what no exporter writes. Copy the folder again."""


class ArtefactSchemaError(ArtefactError):
    """A newer version wrote the folder, or nc did not. Install a newer nc-run."""


class InputError(RunnerError, ValueError):
    """Inputs of a call that do not fit the model, or an argument that has no such value."""


class BackendError(RunnerError, RuntimeError):
    """A function in C failed."""


class BackendUnavailableError(BackendError):
    """This CPU lacks an instruction set that the folder needs, or a library of this package is missing."""


class VerificationError(BackendError):
    """The outputs for the example differ from those of the export by more than rounding explains."""
