"""What the commands share: their paths and options, how they print, and how they end."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nc.errors import NCError, NCWarning
from nc.process import env
from nc.text.plain import plain, said

FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PIPE_WIDTH = 160
#: What a shell says of a command that a closed pipe stopped: 128 and the number of the signal.
_CLOSED_PIPE = 128 + signal.SIGPIPE
_STOPPED = 128 + signal.SIGINT
#: Exit code of a crash: EX_SOFTWARE of sysexits.h.
CRASH = 70


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Add `--debug`, print errors and warnings of nc as lines on stderr, and choose the exit code."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            with _our_warnings():
                function(*args, **kwargs)
                sys.stdout.flush()
        except BrokenPipeError:
            _leave_stdout()
            sys.exit(_CLOSED_PIPE)
        except (NCError, OSError) as error:
            if debug:
                traceback.print_exc()
            click.echo(f"nc: error: {plain(error)}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("nc: stopped", err=True)
            sys.exit(_STOPPED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            traceback.print_exc()
            click.echo(f"nc: defect of nc, please report it with the lines above: {said(error)}", err=True)
            sys.exit(CRASH)

    return run


def _leave_stdout() -> None:
    """Let nothing more be written to a closed pipe: Python would complain of it at exit."""
    with contextlib.suppress(OSError):  # no real file, in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _our_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", NCWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, NCWarning):
                click.echo(f"nc: warning: {plain(message)}", err=True)
            else:
                usual(message, category, *where, **options)

        warnings.showwarning = show
        yield


def console_of(stderr: bool = False) -> Console:
    """Return what prints to a terminal, a file or a pipe."""
    # Operator names and commands hold brackets and colons; rich would take them for markup and emoji.
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not env.COLUMNS.is_set:
        console.width = _PIPE_WIDTH  # a file or pipe has no width; 80 would cut operator names
    return console


def progress_bar() -> Progress:
    """Return a bar on stderr, shown on terminals alone."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = console_of(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


class BackendOption(click.Option):
    """`--backend`: its help names the backends that are known when it is shown."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help."""
        from nc.backends import backend_names

        *names, last = ("auto", *backend_names())
        self.help = f"{', '.join(names)} or {last}."
        return super().get_help_record(ctx)


@contextlib.contextmanager
def step_of(progress: Progress, text: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a step, which is done at the end of the block; yields what tells how far it is."""
    step = progress.add_task(text, total=1)

    def say(done: int, total: int, name: str) -> None:
        progress.update(step, completed=done, total=total, description=f"{text}: {name}")

    yield say
    progress.update(step, completed=1, total=1, description=text)
