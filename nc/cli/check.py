"""`python -m nc check`: the gate of a deployment pipeline."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from nc.cli.shell import FOLDER, command
from nc.text.html_page import table

_MAX_DROP = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """With what the artefact is compared, and the limits; the command's options say what they mean."""

    fp32: str | None
    metric: str | None
    baseline: Path | None
    max_drop: float | None
    min_speedup: float | None
    min_baseline_speedup: float | None

    def why_senseless(self) -> str:
        """Return why options do not go together; "" if they do."""
        limits = (self.metric, self.min_speedup, self.min_baseline_speedup)
        texts = {
            "Give --fp32, --baseline, or both: what is it compared with?": (
                self.fp32 is None and self.baseline is None
            ),
            "--min-speedup is against the float model: give --fp32.": (
                self.min_speedup is not None and self.fp32 is None
            ),
            "--min-baseline-speedup needs --baseline.": (
                self.min_baseline_speedup is not None and self.baseline is None
            ),
            "--max-drop is of a metric: give --metric.": self.max_drop is not None and self.metric is None,
            "Nothing is asked of the artefact: give --metric, --min-speedup or --min-baseline-speedup.": all(
                limit is None for limit in limits
            ),
        }
        return next((text for text, wrong in texts.items() if wrong), "")


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--fp32", metavar="PKG.MODULE:FACTORY", help="Returns the float model that DIR was made from.")
@click.option(
    "--metric",
    metavar="PKG.MODULE:FUNCTION",
    help="Called with a model; gives a number, or one for each sample. Larger is better.",
)
@click.option("--baseline", type=FOLDER, help="The artefact that is in production.")
@click.option("--max-drop", type=float, help="Of the metric, in its own units (default: 0.01).")
@click.option("--min-speedup", type=click.FloatRange(min=0), help="Against fp32.")
@click.option("--min-baseline-speedup", type=click.FloatRange(min=0), help="Against the baseline, as 0.95.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="For each comparison."
)
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page.")
@command
def check(folder: Path, seconds: float, page: Path | None, **options: Any) -> None:
    """Decide whether the artefact in DIR may be published; exit code 0 if it may, 1 if not.

    Quality and speed are measured on this machine against the float model (--fp32), against the artefact in
    production (--baseline), or both, the models in turns. A limit is missed only if the whole 95 % interval
    of what was measured misses it: noise fails no build. With scores for each sample the interval of the drop
    is that of the paired differences.

    The result is one line of JSON.
    """
    from nc.api.artefact import load
    from nc.api.report_page import page_of
    from nc.api.warm import example_call
    from nc.cli import gate, inputs
    from nc.storage import marks
    from nc.storage.atomic import write_text

    asked = _Asked(**options)
    if why := asked.why_senseless():
        raise inputs.RequestError(why)
    function = None if asked.metric is None else inputs.named_function(asked.metric)
    q_model = inputs.captured(load(folder), folder)
    others: dict[str, tuple[Any, float | None]] = {}
    if asked.fp32 is not None:
        others["fp32"] = inputs.make_model(asked.fp32), asked.min_speedup
    if asked.baseline is not None:
        others["baseline"] = load(asked.baseline), asked.min_baseline_speedup
    args, kwargs = example_call(q_model.graph)
    ours = None if function is None else gate.scores(function, q_model)
    compared = []
    for what, (model, _) in others.items():
        theirs = None if function is None else gate.scores(function, model)
        compared.append(
            gate.against(
                what,
                ours,
                theirs,
                lambda: q_model(*args, **kwargs),
                lambda model=model: model(*args, **kwargs),  # type: ignore[misc]
                seconds,
            )
        )
    most = _MAX_DROP if asked.max_drop is None else asked.max_drop
    reasons = [why for each in compared for why in each.why_not(most, others[each.what][1])]
    result = {
        "passed": not reasons,
        "reasons": reasons,
        "sqnr_vs_fp32_db": q_model.graph.sqnr_vs_fp32_db,
        **{each.what: dataclasses.asdict(each) for each in compared},
    }
    if page is not None:
        title = "Must not be published" if reasons else "May be published"
        measured = table(("", ""), [(name, json.dumps(value)) for name, value in result.items()])
        write_text(page, page_of(q_model.report(), title, measured), marks.page)
    click.echo(json.dumps(result))
    if reasons:
        sys.exit(1)
