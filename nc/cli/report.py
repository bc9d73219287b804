"""`python -m nc report`: the report of an artefact, as text or as a page."""

from __future__ import annotations

from pathlib import Path

import click

from nc.cli.shell import FOLDER, command


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page instead of text."
)
@click.option(
    "--profile/--no-profile", default=True, show_default=True, help="Time each kernel on the example inputs."
)
@command
def report(folder: Path, page: Path | None, profile: bool) -> None:
    """Show what runs for each operator of the artefact in DIR, where the time goes, and why.

    The page is one file that needs no network.
    """
    from nc.api.artefact import load
    from nc.api.quantized import QuantizedModel
    from nc.api.warm import example_call
    from nc.api.workflow import report as report_of
    from nc.cli.inputs import RequestError, writing

    if page is not None and page.suffix != ".html":
        msg = f"--html {page}: expected a name that ends in .html."
        raise RequestError(msg)
    q_model = load(folder)
    if not isinstance(q_model, QuantizedModel):
        if page is not None:
            msg = f"{folder} holds a {type(q_model).__name__} with low-bit weights, which has no page."
            raise RequestError(msg)
        click.echo(str(report_of(q_model)))
        return
    args, kwargs = example_call(q_model.graph)
    if args and kwargs and profile:
        msg = "This model takes inputs by position and by name, and a profile takes one kind: --no-profile."
        raise RequestError(msg)
    found = q_model.report(profile_inputs=(args or kwargs) if profile else None)
    if page is None:
        click.echo(str(found))
        return
    with writing(page):
        found.save(page)
    click.echo(f"written to {page}")
