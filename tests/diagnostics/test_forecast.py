"""Forecasts are about right, change nothing, and the largest batch size backs off."""

import gc
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import neuromanifold as nm
from neuromanifold.diagnostics import forecast as module
from neuromanifold.diagnostics import memory
from neuromanifold.diagnostics.forecast import duration, largest_batch
from neuromanifold.diagnostics.memory import PeakMemory, largest_that_fits
from neuromanifold.results.files import byte_size
from tests.problems.networks import PROBLEMS
from tests.problems.problem import Net
from tests.run.test_contract import MODEL, batches


class Slow(nn.Module):
    """Takes some time for each batch, and more for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02 if next(self.calls) else 0.2)
        out: Tensor = self.layer(x)
        return out


def slow_data(number: int, pause: float) -> Iterator[Tensor]:
    for _ in range(number):
        time.sleep(pause)
        yield torch.randn(8, 4)


class SlowData:
    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[Tensor]:
        return slow_data(40, 0.03)


def test_time_is_that_of_the_run() -> None:
    found = nm.forecast(Slow(), SlowData())
    assert (found.batches, found.samples, found.passes, found.measured) == (40, 8, 1, 3)
    assert found.seconds_first > 0.2
    assert found.seconds_waiting >= 0.03
    assert found.seconds_working >= 0.02
    assert found.seconds == pytest.approx(found.seconds_first + 39 * found.seconds_per_batch)


def test_processes_share_the_batches_and_not_the_reading() -> None:
    alone, four = nm.forecast(Slow(), SlowData()), nm.forecast(Slow(), SlowData(), processes=4)
    assert (four.processes, four.batches) == (4, alone.batches)
    assert four.seconds == pytest.approx(
        four.seconds_first + 9 * (4 * four.seconds_waiting + four.seconds_working), rel=1e-6
    )
    assert "for each of 4 processes" in str(four)
    assert "processes" not in str(alone)
    with pytest.raises(ValueError, match="`processes` must be between 1 and 1000000"):
        nm.forecast(Slow(), SlowData(), processes=0)


def test_a_forecast_stops_when_batches_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONG", 0.1)
    found = nm.forecast(Slow(), SlowData(), batches=10)
    assert found.measured == 1
    assert found.seconds_working >= 0.2


@pytest.mark.parametrize(
    ("estimator", "passes"),
    [(nm.Hutchinson(3, deflate=0, orthogonal=False), 3), (nm.Exact(), 2), (nm.MonteCarlo(5), 5), (nm.Empirical(), 1)],
    ids=repr,
)
def test_passes_are_those_of_the_estimator(estimator: nm.Estimator, passes: int) -> None:
    found = nm.forecast(MODEL, batches(16), estimator)
    assert found.passes == passes
    assert found.estimator == repr(estimator)


@pytest.mark.parametrize("name", PROBLEMS)
def test_it_works_for_any_model_and_changes_nothing(name: str) -> None:
    problem = PROBLEMS[name]
    before = {key: value.clone() for key, value in problem.model.state_dict().items()}
    found = nm.forecast(problem.model, problem.data, likelihood=problem.likelihood, **problem.options)
    assert found.memory > sum(p.numel() * p.element_size() for p in problem.model.parameters() if p.requires_grad)
    assert all(module.training for module in problem.model.modules())
    assert all(torch.equal(value, before[key]) for key, value in problem.model.state_dict().items())


def test_the_file_is_as_large_as_it_says(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 3))
    data = [torch.randn(4, 200)]
    nm.fisher_diagonal(model, data, checkpoint=tmp_path / "state").save(tmp_path / "fisher")
    found = nm.forecast(model, data)
    for name in ("fisher", "state"):
        assert found.file == pytest.approx((tmp_path / name).stat().st_size, rel=0.02)


def test_data_without_a_length() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.randn(64, 4).double())

    for data in (DataLoader(Stream(), batch_size=8), iter(batches(8))):
        found = nm.forecast(MODEL, data)
        assert found.batches is None
        assert found.seconds is None
        assert "unknown" in str(found)
    loader = DataLoader(TensorDataset(torch.randn(64, 4).double()), batch_size=8)
    assert nm.forecast(MODEL, loader).batches == 8


def test_the_first_batch_may_have_nothing_that_counts() -> None:
    """Neither one without samples, nor one whose labels are all ignored; memory is that of the largest."""
    x, y = torch.randn(16, 4).double(), torch.zeros(16).long()
    for first in ((x[:0], y[:0]), (x, y - 100)):
        found = nm.forecast(MODEL, [first, (x[:8], y[:8]), (x[:4], y[:4])])
        assert found.samples == 4
        assert found.memory >= nm.forecast(MODEL, [(x[:8], y[:8])]).memory


def test_memory_is_that_of_the_largest_batch_seen() -> None:
    large, small = torch.randn(4000, 4).double(), torch.randn(2, 4).double()
    assert nm.forecast(MODEL, [small, large]).memory == nm.forecast(MODEL, [large, small]).memory


def test_it_prints_as_a_table() -> None:
    text = str(nm.forecast(MODEL, batches(16)))
    assert "Sequential with 67 parameters on cpu" in text
    assert "4, of 16 samples, 1 backward pass each" in text
    assert [line.split("  ")[0] for line in text.splitlines()[2:]] == [
        "batches",
        "first batch",
        "each further",
        "all",
        "memory",
        "result file",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0032, "3.2 ms"),
        (0.32, "320 ms"),
        (4.5, "4.5 s"),
        (62.0, "62 s"),
        (720.0, "12 min"),
        (12000.0, "3 h 20 min"),
        (7199, "2 h 0 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (3200, "3.2 kB"), (5e6, "5 MB"), (7.25e9, "7.25 GB"), (1e12, "1 TB")]
)
def test_sizes(count: float, text: str) -> None:
    assert byte_size(count) == text


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`batches` must be between 1"):
        nm.forecast(MODEL, batches(16), batches=0)
    with pytest.raises(TypeError, match="an iterable of batches"):
        nm.forecast(MODEL, torch.randn(4, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`data`"):
        nm.forecast(MODEL, [])


# ---------------------------------------------------------------------------------------------------- memory


def test_tensors_are_counted_as_long_as_they_live() -> None:
    with PeakMemory() as found:
        a = torch.ones(1000)
        b = a.view(10, 100)  # the same memory
        assert found.now == 4000
        c = a + 1
        assert (found.now, found.most) == (8000, 8000)
        del a, c
        assert found.now == 4000
        del b
        assert (found.now, found.most) == (0, 8000)
        torch.ones(10).double()
        assert (found.now, found.most) == (0, 8000)


PEAK = """
import sys
from pathlib import Path
import torch
from torch import nn
import neuromanifold as nm

torch.set_num_threads(1)

def memory(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])

width, depth, size, kind = (*map(int, sys.argv[1:4]), sys.argv[4])
warm = nn.Linear(4, 3)
nm.fisher_diagonal(warm, [torch.randn(4, 4)] * 2)
start = memory("VmRSS")
layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(width, 10))
data = [torch.randn(size, width)] * 3
fim = nm.fisher_diagonal(model, data, granularity=kind)
taken = memory("VmHWM") - start
print(taken, nm.forecast(model, data, granularity=kind).memory)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of a process")
@pytest.mark.parametrize(
    ("width", "depth", "number", "kind"),
    [
        (1500, 3, 16, "auto"),
        pytest.param(400, 3, 4000, "batch", marks=pytest.mark.slow),
        pytest.param(1500, 3, 16, "batch", marks=pytest.mark.slow),
        pytest.param(400, 3, 8000, "auto", marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_a_run_is_what_was_forecast(width: int, depth: int, number: int, kind: str) -> None:
    """Of the whole process, whose allocator is told to give back what is free."""
    command = [sys.executable, "-c", PEAK, str(width), str(depth), str(number), kind]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    taken, forecast = map(int, done.stdout.split())
    assert forecast == pytest.approx(taken, rel=0.25)


# ---------------------------------------------------------------------------------------------------- batch size


@pytest.mark.parametrize(("room", "most", "expected"), [(100, 1024, 64), (1, 1024, 1), (0, 1024, 0), (999, 48, 32)])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_it_backs_off_when_memory_runs_out(error: Exception, room: int, most: int, expected: int) -> None:
    tried = []

    def attempt(number: int) -> bool:
        tried.append(number)
        if number > room:
            raise error
        return True

    assert largest_that_fits(attempt, most) == expected
    assert tried[: len(tried) - 1] == [2**i for i in range(len(tried) - 1)]
    assert max(tried) <= most


def test_other_errors_go_on() -> None:
    def attempt(_: int) -> bool:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_that_fits(attempt, 8)


def limited(room: int) -> nn.Module:
    """A model that runs out of memory with more samples."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if len(x) > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out: Tensor = m.layer(x)
        return out

    return Net(forward, layer=nn.Linear(4, 3))


def sized(number: int) -> list[Tensor]:
    return list(torch.randn(2 * number, 4).split(number))


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """Garbage is collected before each attempt, which takes long among all the objects of a test run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def only_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times differ on a busy machine."""
    monkeypatch.setattr(module, "_GAIN", math.inf)


@pytest.mark.usefixtures("only_memory_counts")
def test_the_largest_batch_of_a_model() -> None:
    assert largest_batch(limited(11), sized, most=64) == 8
    assert largest_batch(limited(64), sized, most=4) == 4
    with pytest.raises(MemoryError, match="too little room for a single sample"):
        largest_batch(limited(0), sized)


def forecasts(monkeypatch: pytest.MonkeyPatch, seconds: list[float], bytes_each: int) -> None:
    """So many seconds for batches of 1, 2, 4, ... samples."""

    def fake(_: nn.Module, data: list[Tensor], **__: Any) -> SimpleNamespace:
        samples = len(data[0])
        working = seconds[round(math.log2(samples))]
        return SimpleNamespace(samples=samples, seconds_working=working, memory=samples * bytes_each)

    monkeypatch.setattr(module, "forecast", fake)
    monkeypatch.setattr(memory, "free", lambda _: 1000)


def test_batches_that_would_fill_the_memory_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts(monkeypatch, [1.0] * 11, 100)
    assert largest_batch(MODEL, sized) == 8  # sixteen would not leave a fifth
    forecasts(monkeypatch, [1.0] * 11, 101)
    assert largest_batch(MODEL, sized) == 4


def test_larger_batches_that_are_not_faster_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts(monkeypatch, [8.0, 12.0, 24.0, 30.0], 1)
    assert largest_batch(MODEL, sized) == 2


def test_the_memory_of_this_machine_is_known() -> None:
    there = memory.free(torch.device("cpu"))
    assert there is None or 2**20 < there < 2**50
