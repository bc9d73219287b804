"""`python -m nc check`: the gate of a deployment pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nc.cli.shell import FOLDER, command
from nc.errors import NCError
from nc.text.html_page import table
from nc.text.plain import plain, said

_MAX_DROP = 0.01
PASS, FAIL, INCONCLUSIVE, ERROR = "pass", "fail", "inconclusive", "error"
_TITLES = {
    PASS: "May be published",
    FAIL: "Must not be published",
    INCONCLUSIVE: "Not decided whether it may be published",
}
#: Exit codes; "inconclusive" is that of `--inconclusive fail`.
_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}
#: What can happen, the exit code, and the outcome in the JSON; for the documents.
PATHS = (
    ("The whole 95 % interval of each measurement meets its limit.", 0, PASS),
    ("The whole interval of a measurement misses its limit.", 1, FAIL),
    (
        "A limit is inside of an interval, the upper end of an interval of speeds is more than 3 times the "
        "lower one, or there was time for fewer than three rounds: with `--inconclusive fail`.",
        3,
        INCONCLUSIVE,
    ),
    ("The same without it; the reasons are in the JSON and on stderr.", 0, INCONCLUSIVE),
    ("A limit is NaN, infinite or negative, or the options ask nothing.", 2, ERROR),
    (
        "The artefact, the model or the metric can't be loaded, or ends with an exception or an exit.",
        2,
        ERROR,
    ),
    ("The metric gives no finite number of Python, NumPy or torch, or other numbers of scores.", 2, ERROR),
    ("`--html` names a file that is not a page of nc, or can't be written.", 2, ERROR),
    ("An option is unknown, or DIR does not exist.", 2, "no JSON"),
    ("nc has a defect; stderr has a traceback.", 70, ERROR),
    ("Ctrl-C", 130, "no JSON"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """With what the artefact is compared, and the limits; the command's options say what they mean."""

    fp32: str | None
    metric: str | None
    baseline: Path | None
    max_drop: float | None
    min_speedup: float | None
    min_baseline_speedup: float | None
    seconds: float

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
        numbers = {
            "--max-drop": self.max_drop,
            "--min-speedup": self.min_speedup,
            "--min-baseline-speedup": self.min_baseline_speedup,
            "--seconds": self.seconds,
        }
        texts |= {
            f"{name} {value}: expected a finite number of at least 0.": not (0 <= value < math.inf)
            for name, value in numbers.items()
            if value is not None
        }
        texts[f"--seconds {self.seconds}: expected at least 0.1."] = self.seconds < 0.1
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
@click.option("--min-speedup", type=float, help="Against fp32.")
@click.option("--min-baseline-speedup", type=float, help="Against the baseline, as 0.95.")
@click.option(
    "--inconclusive",
    type=click.Choice([PASS, FAIL]),
    default=PASS,
    show_default=True,
    help="What follows if an interval is too wide to decide.",
)
@click.option("--seconds", type=float, default=10.0, show_default=True, help="For each comparison.")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page.")
@command
def check(folder: Path, page: Path | None, inconclusive: str, **options: Any) -> None:
    """Decide whether the artefact in DIR may be published.

    Quality and speed are measured on this machine against the float model (--fp32), against the artefact in
    production (--baseline), or both, the models in turns. A limit is missed only if the whole 95 % interval
    of what was measured misses it, and met only if the whole interval meets it. What is between is
    inconclusive, and passes unless --inconclusive says otherwise. With scores for each sample the interval of
    the drop is that of the paired differences.

    Exit code 0: it may be published. 1: a limit is missed. 2: it could not be measured. 3: inconclusive, with
    --inconclusive fail.

    The result is one line of JSON, whose "outcome" is pass, fail, inconclusive or error. What the metric and
    the models print goes to stderr.
    """
    from nc.cli import inputs
    from nc.storage import marks
    from nc.storage.atomic import write_text

    with _told():
        asked = _Asked(**options)
        if why := asked.why_senseless():
            raise inputs.RequestError(why)
        if page is not None:
            inputs.check_page(page)
        outcome, result, text = _measured(folder, asked)
        passed = outcome == PASS or (outcome == INCONCLUSIVE and inconclusive == PASS)
        line = json.dumps({"outcome": outcome, "passed": passed, **result}, allow_nan=False)
        if page is not None:
            write_text(page, text, marks.page)
    click.echo(line)
    if outcome == INCONCLUSIVE:
        click.echo(f"nc: warning: inconclusive: {'; '.join(result['reasons'])}", err=True)
    if not passed:
        sys.exit(_CODES[outcome])


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Print the line of JSON of a check that fails, whatever fails."""
    try:
        yield
    except Exception as error:
        why = plain(error) if isinstance(error, NCError) else said(error)
        click.echo(json.dumps({"outcome": ERROR, "passed": False, "reasons": [why]}))
        raise


def _measured(folder: Path, asked: _Asked) -> tuple[str, dict[str, Any], str]:
    """Return the outcome, what was measured as plain values, and the page."""
    from nc.api.artefact import load
    from nc.api.warm import example_call
    from nc.cli import gate, inputs
    from nc.reports.report_page import page_of

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
                asked.seconds,
            )
        )
    most = _MAX_DROP if asked.max_drop is None else asked.max_drop
    failed = [why for each in compared for why in each.why_not(most, others[each.what][1])]
    undecided = [why for each in compared for why in each.undecided(most, others[each.what][1])]
    outcome = FAIL if failed else INCONCLUSIVE if undecided else PASS
    sqnr_db = q_model.graph.sqnr_vs_fp32_db
    result = {
        "reasons": failed or undecided,
        "sqnr_vs_fp32_db": sqnr_db if math.isfinite(sqnr_db) else None,  # JSON has no Infinity
        **{each.what: dataclasses.asdict(each) for each in compared},
    }
    rows = [("outcome", outcome), *((name, json.dumps(value)) for name, value in result.items())]
    return outcome, result, page_of(q_model.report(), _TITLES[outcome], table(("", ""), rows))
