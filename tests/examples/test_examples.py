"""Every script and notebook of examples/ runs, is short, and says what it should."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.notebooks import outputs

pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
pytest.importorskip("peft", reason="needs neuromanifold[peft]")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "small.py")
SAYS = {  # a pattern of what each one prints
    "callback": r"step 8: tr F = \d.*\nresults of each step: step-2\.safetensors step-4",
    "consolidation": r"without the penalty: digits \d+ %.*\n +with the penalty: digits \d+ %",
    "language_model_lora": r"tr F = .* per sequence, .* per token\nmost important:\n  .*lora_",
    "laplace": r"noisy images, negative log-likelihood: \d\.\d+ alone, \d\.\d+ averaged",
    "many_processes": r"1 processes, 256 samples: tr F = (\d\.\d+)\none process: \1",
    "merging": r"Merged \(fisher\)(.|\n)*is read by transformers: DistilBertForSequenceClassification",
    "pruning": r"50% gone: 9\d\.\d % by Fisher",
    "text_classifier": r"tr F = \d\.\d+ ± 0\.0000, over 64 texts\nwritten: .*fisher\.safetensors .*fisher\.html",
    "vision_model": r"mean relative error: 0\.\d+ of one pass, 0\.\d+ of four",
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when called from a shell, offline."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def one_process() -> dict[str, str]:
    """What torchrun tells the one process of a group."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_there_is_one_for_each_use() -> None:
    assert {path.stem for path in SCRIPTS} == set(SAYS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("alone")
def test_scripts_run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text()
    assert text.count("\n") < 60
    assert f"examples/{path.name}" in text.split('"""')[1]
    monkeypatch.setattr(sys, "argv", [str(path)])
    if path.stem == "many_processes":
        for name, value in one_process().items():
            monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    runpy.run_path(str(path), run_name="__main__")
    assert torch.get_num_threads() == threads
    assert re.search(SAYS[path.stem], capsys.readouterr().out)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.usefixtures("alone")
def test_notebooks_print_what_they_show(path: Path) -> None:
    notebook = json.loads(path.read_text())
    found = outputs(notebook)
    kept = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(found) == len(kept) > 2
    for new, old in zip(found, kept, strict=True):
        assert [one["output_type"] for one in new] == [one["output_type"] for one in old]
        assert [one.get("text") for one in new] == [one.get("text") for one in old]


@pytest.mark.slow
def test_two_processes_share_a_run() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "many_processes.py"]
    found = subprocess.run(
        command, cwd=EXAMPLES, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert re.search(r"2 processes, 256 samples: tr F = (\d\.\d+)\none process: \1", found.stdout), found.stderr
