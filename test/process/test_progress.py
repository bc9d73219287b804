"""What a long call shows on stderr: nothing soon, a bar in a terminal, a line now and then elsewhere."""

import os
import pty
import re
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch import nn

import nc
from nc.process import progress
from nc.process.progress import shown


def test_a_function_of_the_caller_is_told_as_before():
    told = []
    with shown(lambda *step: told.append(step), "convert") as tell:
        tell(1, 2, "a")
    assert told == [(1, 2, "a")]


@pytest.mark.parametrize("given", [None, True, False])
def test_short_calls_show_nothing_and_leave_no_thread(given, capsys):
    with shown(given, "convert") as tell:
        tell(0, 1, "a")
    assert capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "nc-progress"]


def test_no_thread_is_left_by_an_error():
    with pytest.raises(ZeroDivisionError), shown(None, "convert"):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "nc-progress"]


def test_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_AFTER", 0.05)
    with shown(None, "convert") as tell:
        tell(1, 4, "blocks\n.3")
        threading.Event().wait(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 8
    assert all(re.fullmatch(r"nc: convert \[1/4\] blocks \.3, 0 s", line) for line in lines), lines


@pytest.mark.parametrize(("given", "expected"), [(None, True), (False, False)])
def test_convert_and_tune_show_it(monkeypatch, capsys, given, expected):
    monkeypatch.setattr(progress, "_LINE_AFTER", 0.01)
    x = torch.randn(32, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    prepared = nc.prepare(model, "auto", example_inputs=x)
    prepared(x)
    nc.convert(prepared, progress=given)
    assert ("nc: convert [" in capsys.readouterr().err) == expected
    nc.tune(model, x, lambda m: m(x), points=2, budget=30, progress=given)
    assert ("nc: tune" in capsys.readouterr().err) == expected


@pytest.mark.parametrize("given", [3, "bar", [print]])
def test_something_else(given):
    x = torch.randn(2, 4)
    prepared = nc.prepare(nn.Linear(4, 4).eval(), nc.DynamicQuantConfig(), example_inputs=x)
    with pytest.raises(nc.InputError, match="Expected progress to be a function that is told"):
        nc.convert(prepared, progress=given)


def test_a_line_that_changes_in_a_notebook(monkeypatch, capsys):
    """With what IPython has in a kernel; a bar of rich needs ipywidgets, which need not be installed."""
    texts = []

    class Handle:
        def update(self, data, raw):
            texts.append((data["text/plain"], raw))

    def display(data, raw, display_id):
        texts.append((data["text/plain"], raw and display_id))
        return Handle()

    shell = types.SimpleNamespace(kernel="one")
    module = types.SimpleNamespace(get_ipython=lambda: shell, display=types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr(progress, "_BAR_AFTER", 0.05)
    with shown(None, "convert") as tell:
        tell(1, 4, "blocks.3")
        threading.Event().wait(0.9)
    assert all(given for _, given in texts)
    *lines, last = [text for text, _ in texts]
    assert len(lines) >= 2
    assert all(re.fullmatch(r"nc: convert \[1/4\] blocks\.3, \d s", line) for line in lines), lines
    assert re.fullmatch(r"nc: convert \[1/4\] blocks\.3, \d s, done", last)
    assert capsys.readouterr().err == ""


SCRIPT = """
import time
from nc.process import progress
progress._BAR_AFTER = 0.05
with progress.shown(None, "convert") as tell:
    tell(1, 4, "[bold]layer.3")
    time.sleep(1.5)
"""


def test_a_bar_in_a_terminal():
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=follower, env=environment, timeout=120
    )
    os.close(follower)
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 0
    assert done.stdout == b""
    assert "convert: [bold]layer.3" in text
    assert "1/4" in text
