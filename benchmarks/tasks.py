"""The tasks to judge accuracy on, and a comparison of candidates on one of them.

With labels, or with figures of what is right:

* `mnist`, `faces`: convolutional networks that ship in packages; task_mnist.py, task_faces.py.
* `pitch`: a convolutional network over sound, on synthetic tones in noise; task_pitch.py.
* `similarity`, `spam`: MiniLM on documents that people compared, and on mails; task_similarity.py,
  task_spam.py.
* `digits`, `lm`: a network and a language model that are trained here; task_digits.py, task_lm.py.

Against the answers of fp32:

* `minilm`: the sentence encoder and the protocol of examples/minilm.py; task_minilm.py.
* `pictures`: MobileNetV2 with ImageNet weights; task_pictures.py.

Needs torch, safetensors and transformers only, so that the environment of peers.py can import it too;
packages of weights and data are read, not imported. With a folder, what was trained and the data are kept
there as safetensors, and read from there the next time: all environments then judge the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import turns
from results_rows import Figure, append
from task import Run, Task
from task_digits import Digits
from task_faces import Faces
from task_lm import LanguageModel
from task_minilm import MiniLM
from task_mnist import Mnist
from task_pictures import Pictures
from task_pitch import Pitch
from task_similarity import Similarity
from task_spam import Spam

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (MiniLM, Digits, Pictures, LanguageModel, Mnist, Pitch, Similarity, Spam, Faces)
}
#: Something to run, the size of its constants in MB, and how many of its products run in int8.
Result = tuple[Run, str, str]
Candidate = Callable[[Task], Result]
#: How often a call of each candidate is timed.
ROUNDS = 9


def fp32(task: Task) -> Result:
    """Return the model itself."""
    size = sum(t.numel() * t.element_size() for t in task.model.state_dict().values())
    return task.model, f"{size / 1e6:.1f}", "-"


def loaded(name: str, folder: Path | None) -> Task | None:
    """Return a task; None, after a line that says what to install, where its packages are missing."""
    try:
        return TASKS[name](folder)
    except LookupError as error:
        print(f"\n### {name}\n\nskipped: {error}", flush=True)
        return None


@torch.no_grad()
def compare(
    task: Task,
    candidates: Mapping[str, Candidate],
    results: Path | None,
    packages: Sequence[str],
    rounds: int = ROUNDS,
) -> None:
    """Print a Markdown table when all candidates have been judged and timed, and append rows.

    What is known of a candidate before that goes to stderr.

    Args:
        task: what is judged.
        candidates: by the name of their flow. One whose package is missing is skipped, as is one that fails.
        results: file of the rows; None: no rows.
        packages: whose versions a row names, besides the task's own.
        rounds: in which calls with the first batch of evaluation data take turns.
    """
    expected = task.outputs(task.model)
    found: dict[str, tuple[Result, dict[str, Figure]]] = {}
    failed: dict[str, str] = {}
    for name, candidate in candidates.items():
        try:
            made = candidate(task)
            for _ in range(2):  # engines compile during the first calls
                made[0](**task.calibration[0])
            got = expected if made[0] is task.model else task.outputs(made[0])
            found[name] = made, task.row(expected, got)
            said = "; ".join(f"{n} {f.value}" for n, f in found[name][1].items())
        except ImportError as error:
            said = failed[name] = f"skipped: {_line(error)}"
        except Exception as error:  # the others still count
            said = failed[name] = f"{type(error).__name__}: {_line(error)}"
        print(f"{task.name}, {name}: {said}", file=sys.stderr, flush=True)
    _timed(task, found, rounds)
    _print(task, candidates, found, failed)
    for name, ((_, _, int8), figures) in found.items():
        what = {"measured": "accuracy", "task": task.name, "flow": name}
        what |= {} if int8 == "-" else {"int8 products": int8}
        what |= {"threads": torch.get_num_threads(), "rounds": rounds}
        append(results, what, figures, (*packages, *task.packages))


def _line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "")


def _timed(task: Task, found: Mapping[str, tuple[Result, dict[str, Figure]]], rounds: int) -> None:
    """Add the time of a call and its speed to the figures."""
    batch = task.evaluation[0]
    runs = {turns.BASE: task.model} | {name: result[0] for name, (result, _) in found.items()}
    times = turns.timings({name: lambda run=run: run(**batch) for name, run in runs.items()}, rounds)
    for name, (_, figures) in found.items():
        figures["time"] = turns.duration(times[name])
        figures["speed"] = turns.speed(times[turns.BASE], times[name])


def _print(
    task: Task,
    names: Iterable[str],
    found: Mapping[str, tuple[Result, dict[str, Figure]]],
    failed: Mapping[str, str],
) -> None:
    """Print the table."""
    head = ["", *(f"{name}, {unit}" for name, (unit, _) in task.figures.items())]
    head += ["standard error", "difference to fp32", "SQNR, dB", "ms", "x fp32", "MB", "int8 products"]
    print(f"\n### {task.name}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in names:
        if name in failed:
            print(f"| {name} | {failed[name]} |")
        else:
            (_, size, int8), figures = found[name]
            cells = [name, *(str(figure.value) for figure in figures.values()), size, int8]
            print(f"| {' | '.join(cells)} |")
    sys.stdout.flush()
