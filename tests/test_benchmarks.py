"""Benchmarks keep step with the library: they import, ablate every kernel, and their checks can fail."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from neuromanifold.kernels import dispatch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = sorted(
    ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts)
    for path in (*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("gpu/[a-z]*.py"), *BENCHMARKS.glob("uses/[a-z]*.py"))
)
NEED_TRITON = {"gpu.compiled", "gpu.shapes"}


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def imported(name: str) -> ModuleType:
    if name.startswith("gpu"):
        pytest.importorskip("transformers")
    if name in NEED_TRITON:
        pytest.importorskip("triton")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_every_script_imports(name: str) -> None:
    imported(name)


def test_every_kernel_has_an_ablation() -> None:
    operations = set(re.findall(r'_backend\("(\w+)"', Path(dispatch.__file__).read_text()))
    on_a_gpu = {one for chosen in imported("gpu.ablation").OPERATIONS.values() for one in chosen}
    assert on_a_gpu | set(imported("ablation").SOURCES) == operations


@pytest.fixture
def session(tmp_path: Path) -> object:
    options = argparse.Namespace(budget=60.0, out=str(tmp_path), quick=True, only=None)
    return imported("gpu.session").Session(options)


def test_a_session_collects_failures_and_goes_on(session, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    missing = imported("gpu.session").Missing
    assert isinstance(session.guarded("division", lambda: 1 / 0), missing)
    assert session.guarded("sum", lambda: 1 + 1) == 2
    rows: list[dict[str, object]] = []
    session.checked("good", {"error": 1e-9}, True, rows)
    session.checked("bad", {"error": 0.5}, False, rows)
    with session.share(0.0):
        assert session.guarded("late", lambda: 3) == missing("not run: out of time")
    session.add("Checks", rows)
    assert [name.split(":")[0] for name in session.failures] == ["division", "bad"]
    assert session.not_run == ["late"]
    text = (tmp_path / "gpu.md").read_text()
    assert "| 0.5 | FAIL |" in text
    assert "- late" in text


def test_the_verification_check_sees_a_wrong_rule() -> None:
    behaviour = imported("gpu.behaviour")
    assert all(passed for _, passed in behaviour._wrong_rule(torch.device("cpu")))
    right = behaviour.WrongLinear.__mro__[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behaviour, "WrongLinear", right)  # now nothing is wrong, and the check says that it was not found
        assert not any(passed for _, passed in behaviour._wrong_rule(torch.device("cpu")))


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """The interpreter, by which other tests run them, passes what a compiler refuses."""
    pytest.importorskip("triton")
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "gpu.compiled", "--precision", "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ROWS=True" in done.stdout


def test_graph_checks_run_without_a_gpu() -> None:
    behaviour = imported("gpu.behaviour")
    (row, passed), *_ = behaviour._graphs("DistilBERT", torch.device("cpu"))
    assert row["cuda_graphs=True"] == row["cuda_graphs=auto"] == 0
    assert not passed  # nothing was replayed, which a GPU must do
    rows = behaviour._reads_back(torch.device("cpu"))
    assert [row["warnings"] for row, _ in rows] == [0, 0]
