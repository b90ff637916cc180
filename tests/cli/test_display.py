"""The live display, on a terminal and elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuromanifold.cli.display import length, live, texts
from neuromanifold.problem.progress import RunProgress
from tests.cli.commands import own_module


def test_rates_are_counted_from_the_first_look() -> None:
    first: list[tuple[float, RunProgress]] = []
    assert texts(RunProgress(5, 100, 5, 0.5), 10.0, first) == ("", "± 50 %")  # a checkpoint had a hundred
    assert texts(RunProgress(7, 160, 7, 0.25), 12.0, first) == ("30 samples/s", "± 25 %")
    assert texts(RunProgress(7, 160, 7, None), 12.0, first) == ("30 samples/s", "")


def test_lengths() -> None:
    assert length([1, 2]) == 2
    assert length(iter([1, 2])) is None


def test_nothing_is_shown_where_nobody_looks() -> None:
    with live(3, wanted=True) as observer:
        assert observer is None


SLOWLY = """
import time
import my_own
def batches():
    for batch in my_own.batches():
        time.sleep(0.3)
        yield batch
"""


def test_on_a_terminal_it_shows_rate_time_left_and_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty", reason="needs a Unix terminal")
    own_module(tmp_path, monkeypatch)
    (tmp_path / "slow.py").write_text(SLOWLY)
    options = ["-m", "my_own:model", "-d", "slow:batches", "-o", "fim.safetensors"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "neuromanifold", "estimate", *options],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side has closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    text = shown.decode()
    assert "batches" in text
    assert "samples/s" in text
    assert "±" in text
