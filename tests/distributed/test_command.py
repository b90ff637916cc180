"""`torchrun -m neuromanifold estimate`: the file of one process, written and printed once."""

import atexit
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import neuromanifold as nm
from tests import forked
from tests.distributed import parallel_runs, runs, sharded_runs
from tests.distributed.test_data_parallel import assert_same, load

ROOT = Path(__file__).parents[2]


def model() -> nn.Module:
    return runs.network()


def data() -> list[tuple[Tensor, Tensor]]:
    return runs.batches(9)


def sharded_model() -> nn.Module:
    """In FSDP2, which is up to whoever makes a model that does not fit."""
    return sharded_runs.shard(runs.network(), [])  # type: ignore[no-any-return]


def parallel_model() -> nn.Module:
    """Tensor-parallel, the same."""
    return parallel_runs.parallel(runs.network(), {"0": ColwiseParallel(), "2": RowwiseParallel()})  # type: ignore[no-any-return]


def failing_data() -> list[tuple[Tensor, Tensor]]:
    """Not a number in batch 3, which is rank 1's."""
    found = runs.batches(9)
    found[3] = (torch.full_like(found[3][0], torch.nan), found[3][1])
    return found


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}
    everything = [*command, "neuromanifold", *map(str, arguments)]
    return subprocess.run(everything, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)


def two_processes(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Two copies of this process with what torchrun tells them: they start at once."""

    def as_rank(rank: int) -> None:
        os.environ.update({"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "COLUMNS": "120"})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "CUDA_VISIBLE_DEVICES": ""})
        forked.command(*arguments)()

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [forked.start(partial(as_rank, rank), out, err) for rank in range(2)]
        codes = [forked.returncode(process) for process in processes]
        texts = [file.read() for file in (out, err) if not file.seek(0)]
    return subprocess.CompletedProcess([], max(map(abs, codes)), *texts)


@pytest.mark.parametrize("start", [two_processes, pytest.param(torchrun, marks=pytest.mark.slow)])
def test_the_command_on_two_processes(
    start: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    names = ["-m", f"{__name__}:model", "-d", f"{__name__}:data"]
    options = ["-o", tmp_path / "fim.safetensors", "--checkpoint", tmp_path / "state"]
    done = start("estimate", *names, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Diagonal of the Fisher information") == 1
    assert re.search(r"processes: +2\n", done.stdout)
    assert [entry.name for entry in tmp_path.iterdir()] == ["fim.safetensors"]
    expected = nm.fisher_diagonal(model(), data())
    assert_same(load(tmp_path / "fim.safetensors"), expected)


@pytest.mark.parametrize(
    ("start", "name", "options"),
    [
        (two_processes, "parallel_model", {}),
        (two_processes, "sharded_model", {"error_bars": "rows", "passes": 0.6}),
        *(pytest.param(torchrun, name, {}, marks=pytest.mark.slow) for name in ("sharded_model", "parallel_model")),
    ],
)
def test_a_model_in_parts_on_two_processes(
    start: Callable[..., subprocess.CompletedProcess[str]],
    name: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them writes its part; the table is made of the files."""
    monkeypatch.chdir(ROOT)
    names = ["-m", f"{__name__}:{name}", "-d", f"{__name__}:data"]
    names += [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    done = start("estimate", *names, "-o", tmp_path / "fim.safetensors", "--checkpoint", tmp_path / "state")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Diagonal of the Fisher information") == 1
    *files, index = sorted(entry.name for entry in tmp_path.iterdir())
    assert index == "fim.safetensors.index.json"
    assert files == [f"fim-0000{i + 1}-of-0000{len(files)}.safetensors" for i in range(len(files))]
    assert len(files) > 1
    sharded_runs.compare(load(tmp_path / "fim.safetensors"), nm.fisher_diagonal(model(), data(), **options))


@pytest.mark.slow
def test_an_error_in_one_process_is_one_line(tmp_path: Path) -> None:
    names = ["-m", f"{__name__}:model", "-d", f"{__name__}:failing_data"]
    done = torchrun("estimate", *names, "-o", tmp_path / "fim.safetensors")
    assert done.returncode
    assert "Rank 1: Error: Batch 3 of `data`" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_other_commands_run_on_one_process() -> None:
    done = torchrun("forecast", "-m", f"{__name__}:model", "-d", f"{__name__}:data")
    assert done.returncode
    assert "Error: `command` must be estimate with several processes, got forecast. Run it without" in done.stderr


@pytest.mark.parametrize(("ended", "code"), [(None, 0), (3, 3), ("a message", 1)])
def test_one_of_several_processes_ends_without_the_interpreter(ended: object, code: int) -> None:
    """Whose end threads of a process group may not survive; what is registered for it is done."""
    from neuromanifold.cli.launched import end

    def leave() -> None:
        atexit.register(print, "handlers")
        print("begun")
        try:
            end(ended)
        finally:
            print("torn down")

    done = forked.run(leave)
    assert (done.returncode, done.stdout, done.stderr) == (code, "begun\nhandlers\n", "")


def test_gpus_and_processes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuromanifold.cli.launched import process_group

    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="`device` must be auto, cuda or cpu with several processes, got cuda:1"):
        process_group("cuda:1").__enter__()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="`nproc-per-node` must be at most 1, the number of GPUs, got 2"):
        process_group("auto").__enter__()
