"""`python -m nc report`: the report of an artefact, as text or as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nc.cli.shell import FOLDER, command
from nc.text.plain import plain

if TYPE_CHECKING:
    from nc.api.quantized import QuantizedModel
    from nc.reports.report import Report


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("other", metavar="[OTHER_DIR]", type=FOLDER, required=False)
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page instead of text."
)
@click.option(
    "--model-explorer",
    "explorer",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write node data for Google's Model Explorer (.json), for the fp32 model's torch.export program.",
)
@click.option(
    "--front",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Of `nc.tune`, saved as .json: the page shows it too.",
)
@click.option(
    "--profile/--no-profile", default=True, show_default=True, help="Time each kernel on the example inputs."
)
@click.option("--details", is_flag=True, help="Show all operators, kernels and checks.")
@command
def report(
    folder: Path,
    other: Path | None,
    page: Path | None,
    explorer: Path | None,
    front: Path | None,
    profile: bool,
    details: bool,
) -> None:
    """Show what runs for each operator of the artefact in DIR, where the time goes, and why.

    The page is one file that needs no network. With OTHER_DIR it compares both artefacts.
    """
    from nc.api.artefact import load
    from nc.api.quantized import QuantizedModel
    from nc.api.workflow import report as report_of
    from nc.cli.inputs import RequestError
    from nc.reports.front_page import section
    from nc.reports.model_explorer import is_node_data, node_data
    from nc.reports.page_compare import comparison
    from nc.reports.report_page import page_of
    from nc.storage import marks
    from nc.storage.atomic import check_first, write_text
    from nc.storage.marks import json_like
    from nc.tuning.front import read_front

    for name, target, suffix in (("--html", page, ".html"), ("--model-explorer", explorer, ".json")):
        if target is not None and target.suffix != suffix:
            msg = f"{name} {target}: expected a name that ends in {suffix}."
            raise RequestError(msg)
        if target is not None:  # before work is done for it
            check_first(target, marks.page if suffix == ".html" else json_like(is_node_data))
    for given, what in ((other, "two artefacts are compared"), (front, "a front is shown")):
        if given is not None and page is None:
            msg = f"{given}: {what} on a page; give --html FILE.html."
            raise RequestError(msg)
    q_model = load(folder)
    if not isinstance(q_model, QuantizedModel):
        if page is not None or explorer is not None:
            msg = f"{folder} holds a {type(q_model).__name__} with low-bit weights, which has no page."
            raise RequestError(msg)
        click.echo(str(report_of(q_model, details=details)))
        return
    found = _report(q_model, profile)
    if explorer is not None:
        text = json.dumps(node_data(q_model.graph.module, found.ops)) + "\n"
        write_text(explorer, text, json_like(is_node_data))
        click.echo(plain(f"written to {explorer}"))
    if page is not None:
        below = "" if front is None else section(read_front(front))
        if other is not None:
            second = load(other)
            if not isinstance(second, QuantizedModel):
                msg = f"{other} holds a {type(second).__name__} with low-bit weights, which has no page."
                raise RequestError(msg)
            below += comparison(found, _report(second, profile), (str(folder), str(other)))
        write_text(page, page_of(found, below=below), marks.page)
        click.echo(plain(f"written to {page}"))
    if page is None and explorer is None:
        click.echo(found.text(details=details))


def _report(q_model: QuantizedModel, profile: bool) -> Report:
    """Return the report of a model, with a profile on its example inputs if `profile` is True.

    Raises:
        RequestError: a profile is requested, and the model takes inputs both by position and by name.
    """
    from nc.api.warm import example_call
    from nc.cli.inputs import RequestError

    args, kwargs = example_call(q_model.graph)
    if args and kwargs and profile:
        msg = "This model takes inputs by position and by name, and a profile takes one kind: --no-profile."
        raise RequestError(msg)
    return q_model.report(profile_inputs=(args or kwargs) if profile else None)
