"""Commands run in this process, as a user would type them."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from neuromanifold.cli.app import app
from tests.hf.tiny import clips, images, reviews, sentences, write_csv, write_jsonl

Folder = Callable[[str], Path]


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(argument) for argument in arguments])


def good(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    return result.output


def bad(*arguments: object) -> str:
    """One line that says what is wrong, and no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.output
    return lines[0]


def write_data(kind: str, folder: Path, count: int = 6) -> tuple[Path, list[object]]:
    """Data for a kind of model, and the options that go with it."""
    words = [sentence.split() for sentence in sentences(count)]
    tags = [[i % 2 for i in range(len(sentence))] for sentence in words]
    match kind:
        case "text" | "decoder text":
            return reviews(folder / "reviews.csv", count), []
        case "pairs":
            pairs = {"a": list(sentences(count)), "b": list(sentences(count, 1)), "label": [0, 1] * (count // 2)}
            return write_jsonl(folder / "pairs.jsonl", pairs), ["--columns", "text=a,text_pair=b"]
        case "tokens":
            return write_jsonl(folder / "words.jsonl", {"words": list(words), "tags": list(tags)}), []
        case "masked":
            return write_csv(folder / "texts.csv", {"text": list(sentences(count))}), ["--mask", 0.3]
        case "causal":
            return write_csv(folder / "texts.csv", {"text": list(sentences(count))}), ["--max-length", 4]
        case "image":
            return images(folder / "images.npz", count), []
        case "audio":
            return clips(folder / "clips.npz", min(count, 5)), []
    raise ValueError(kind)


def own_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """my_own.py: a model, batches, and batches that press Ctrl-C, or kill, if there is a file that says so."""
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_own", raising=False)
    np.savez(folder / "x.npz", x=np.random.default_rng(0).normal(size=(8, 5, 4)).astype(np.float32))
    (folder / "my_own.py").write_text(
        "import os, pathlib, signal\n"
        "import numpy, torch\n"
        "FOLDER = pathlib.Path(__file__).parent\n"
        "def model():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))\n"
        "def batches():\n"
        "    return list(torch.from_numpy(numpy.load(FOLDER / 'x.npz')['x']))\n"
        "def interrupted():\n"
        "    for i, batch in enumerate(batches()):\n"
        "        if i == 3 and (FOLDER / 'interrupt').exists():\n"
        "            (FOLDER / 'interrupt').unlink()\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        yield batch\n"
        "def killed():\n"
        "    for i, batch in enumerate(batches()):\n"
        "        if i == 5 and (FOLDER / 'kill').exists():\n"
        "            (FOLDER / 'kill').unlink()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield batch\n"
        "def unlabelled():\n"
        "    return [torch.full((2, 4), float('nan'))]\n"
    )
