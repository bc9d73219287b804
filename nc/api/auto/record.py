"""What a choice takes down for its report, and whom it tells of its steps."""

from __future__ import annotations

import dataclasses
import traceback

from nc.errors import NCError
from nc.graph.plan import Applied
from nc.process.progress import Progress


def text_of(error: Exception) -> str:
    """Return an error's text; with its type where it is not one of nc, whose texts explain themselves."""
    return str(error) if isinstance(error, NCError) else f"{type(error).__name__}: {error}"


@dataclasses.dataclass(slots=True)
class Record:
    """What a report says of a choice.

    Attributes:
        said: what each step with the chosen model gave.
        failed: what failed → its traceback.
        floor: what is said first of a model that was below the least accuracy.
    """

    said: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    floor: tuple[Applied, ...] = ()

    def failure(self, name: str, error: Exception) -> str:
        """Keep the traceback of what failed, and return why in words."""
        self.failed[name] = "".join(traceback.format_exception(error)).rstrip()
        return text_of(error)


@dataclasses.dataclass(slots=True)
class Steps:
    """Tells a caller of `convert` what is begun."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def begin(self, name: str) -> None:
        """Say that a step begins."""
        if self.progress is not None:
            self.progress(self.done, self.total, name)
        self.done += 1
