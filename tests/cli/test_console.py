"""What commands print: the progress bar on a terminal and elsewhere, tables that fit."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from neuromanifold.cli.console import BAR_COLUMNS, bar_texts, progress_bar
from neuromanifold.run.settings import RunProgress
from tests import forked
from tests.cli.commands import own_module


def test_rates_count_samples_since_the_run_was_resumed() -> None:
    assert bar_texts(RunProgress(5, 100, 5, 0.5), 0.0, 0) == ("", "rel. s.e. 50 %")  # a checkpoint had a hundred
    assert bar_texts(RunProgress(7, 160, 7, 0.023), 2.0, 60) == ("30 samples/s", "rel. s.e. 2.3 %")
    assert bar_texts(RunProgress(7, 160, 7, None), 2.0, 60) == ("30 samples/s", "")


def test_no_bar_is_shown_without_a_terminal() -> None:
    with progress_bar([1, 2, 3], wanted=True) as progress:
        assert progress is False


def test_the_bar_fits_80_columns_with_every_text_whole() -> None:
    console = Console(width=80, file=io.StringIO())
    progress = Progress(*BAR_COLUMNS, console=console)
    progress.add_task("", total=12800, completed=8640, of=12800, rate="1.23e+03 samples/s", error="rel. s.e. 2.3 %")
    with console.capture() as drawn:
        console.print(progress)
    (line,) = drawn.get().splitlines()
    assert len(line) <= 80
    for text in ("8640/12800 batches", "1.23e+03 samples/s", "rel. s.e. 2.3 %"):
        assert text in line


SLOWLY = """
import time
import my_own
def batches():
    for batch in my_own.batches():
        time.sleep(0.1)
        yield batch
"""


def test_on_a_terminal_the_bar_shows_rate_and_relative_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pty = pytest.importorskip("pty", reason="needs a Unix terminal")
    own_module(tmp_path, monkeypatch)
    (tmp_path / "slow.py").write_text(SLOWLY)
    options = ["-m", "my_own:model", "-d", "slow:batches", "-o", "fim.safetensors"]
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with Path(os.devnull).open("w") as nowhere:
        process = forked.start(forked.command("estimate", *options), nowhere, theirs)
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
    assert forked.returncode(process) == 0, shown.decode()
    text = shown.decode()
    assert "batches" in text
    assert "samples/s" in text
    assert "rel. s.e." in text
