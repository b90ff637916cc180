"""`nm.forecast`: what a run will take, from its first batches; and the largest batch size that fits.

first batch         per-sample gradients are verified, kernels compiled: timed apart
the next ones       seconds per batch: waiting for the data, and working on them
memory              on a GPU the peak of these batches; on a CPU that of the tensors of the largest one (`memory.py`)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median, median_low
from typing import Any, Literal

import torch
from torch import nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.diagnostics import memory
from neuromanifold.diagnostics.memory import PeakMemory
from neuromanifold.diagnostics.runs import expected_warnings_ignored
from neuromanifold.estimators import Estimator, Hutchinson
from neuromanifold.problem.batches import model_device, tensors_in
from neuromanifold.problem.cotangents import Likelihood
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.progress import number_of_batches
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.error_bars import ErrorBars
from neuromanifold.results.files import byte_size
from neuromanifold.results.table import aligned
from neuromanifold.run.fisher import diagonal_of
from neuromanifold.run.settings import CudaGraphs, Granularity, LoopOptions, Settings

_LONG = 20.0  # seconds after which no further batch is run
_ROOM = 0.8  # of the free memory: later batches may be longer
_GAIN = 0.95  # a larger batch must lower the seconds of a sample to that
_HEADER = 2**12  # bytes of a file, about, for names and provenance


@dataclass(frozen=True)
class Forecast:
    """Time, memory and file size of a run, before the run: what `nm.forecast` returns.

    Prints as a table.

    Example:
        >>> forecast = nm.forecast(model, data)
        >>> forecast.seconds > 0, forecast.memory > 0
        (True, True)
    """

    model: str
    estimator: str
    device: str
    batches: int | None  #: of the data, where their number is known
    samples: float  #: of a batch
    passes: float  #: backward passes for each batch
    seconds_first: float  #: the first batch, with verification and all that is compiled once
    seconds_waiting: float  #: for the data of a batch
    seconds_working: float  #: on a batch
    memory: int  #: bytes of tensors on the device, at the most; on a CPU the allocator may hold three times as many
    file: int  #: bytes of the result's file; a checkpoint has about as many
    measured: int  #: batches that were run for this
    processes: int = 1  #: that share the batches, each with a device of its own

    @property
    def seconds_per_batch(self) -> float:
        """Seconds for one batch of a process: those spent waiting for the data, and those spent computing.

        Each process goes through all of the data, so it waits for the batches of the others as well.
        """
        return self.processes * self.seconds_waiting + self.seconds_working

    @property
    def seconds(self) -> float | None:
        """Of the whole run, where the number of batches is known."""
        if self.batches is None:
            return None
        own = -(-self.batches // self.processes)  # of the process that has most
        return self.seconds_first + max(0, own - 1) * self.seconds_per_batch

    def __str__(self) -> str:
        number = "as many as there are" if self.batches is None else f"{self.batches:,}"
        waiting = self.processes * self.seconds_waiting
        each = f" for each of {self.processes} processes" if self.processes > 1 else ""
        passes = f"{self.passes:.4g} backward " + ("pass" if self.passes == 1 else "passes")
        rows = {
            "batches": f"{number}, of {self.samples:.4g} samples, {passes} each",
            "first batch": duration(self.seconds_first),
            "each further": f"{duration(self.seconds_per_batch)}, {duration(waiting)} waiting for data",
            "all": "unknown: the data have no length" if self.seconds is None else duration(self.seconds),
            "memory": byte_size(self.memory) + each,
            "result file": byte_size(self.file),
        }
        title = f"Forecast for {self.model} on {self.device}, from {self.measured} of its batches"
        return "\n".join([title, self.estimator, *aligned(list(rows.items()), left=2)])


@torch.inference_mode(mode=False)
def forecast(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    estimator: Estimator | None = None,
    likelihood: Likelihood = Categorical,
    parameters: Selection = None,
    granularity: Granularity = "auto",
    batches: int = 3,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
    cuda_graphs: CudaGraphs = "auto",
    processes: int = 1,
    error_bars: ErrorBars | Literal["auto"] = "auto",
) -> Forecast:
    """Return time, memory and file size of `fisher_diagonal` with the same arguments, from a run of a few batches.

    With `cuda_graphs`, give it enough batches to get to replays.  Arguments that are not listed are those of
    `fisher_diagonal`.  Cost: that of the batches that are run; after 20 seconds no further one is.

    Args:
        batches: how many to run, which a generator is then left without; the first is timed apart.
        processes: how many would share the run, each with a device like this one and all the data; this process alone
            is run, and the sum over processes at the end is left out.

    Returns:
        A `Forecast`, which prints as a table.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.

    Example:
        >>> forecast = nm.forecast(model, data, batches=2)
        >>> forecast.batches, forecast.file > 0
        (4, True)
    """
    processes = integer_in_range(processes, "processes", 1, 10**6, "those that share the run")
    batches = integer_in_range(batches, "batches", 1, 10**6, "at least one")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    settings = Settings.of(Hutchinson() if estimator is None else estimator, granularity, 0)
    timer = _BatchTimer(problem.device)

    def run(items: Iterable[object]) -> DiagonalFisher:
        with expected_warnings_ignored():
            options = LoopOptions(cuda_graphs=cuda_graphs)
            return diagonal_of(replace(problem, data=items), settings, options, error_bars=error_bars)

    result = run(timer.timed(islice(data, batches)))
    p = result.provenance
    return Forecast(
        model=p.model,
        estimator=p.estimator,
        device=p.device,
        batches=number_of_batches(data),
        samples=result.count / p.batches,
        passes=p.passes / p.batches,
        seconds_first=timer.waiting[0] + timer.working[0],
        seconds_waiting=median(timer.waiting[1:] or timer.waiting),
        seconds_working=median_low(timer.working[1:] or timer.working),  # of two, the one that is not verified
        memory=timer.peak(run),
        file=sum(t.numel() * t.element_size() for t in (*result.sums.values(), *result.noise.values())) + _HEADER,
        measured=p.batches,
        processes=processes,
    )


def largest_batch(
    model: nn.Module, make_data: Callable[[int], Iterable[object]], most: int = 1024, **options: Any
) -> int:
    """The batch size, a power of two, to run with: doubled while it fits, and while a sample takes less time with it.

    `make_data` gives the data in batches of a size; three of them are run with each size, up to `most`.  `options` are
    those of `forecast`.  A size fits if no memory runs out, and a fifth of what is free is left for batches that are
    longer than the first ones.
    """
    most = integer_in_range(most, "most", 1, 2**40, "a batch size")
    device, fastest = model_device(model), float("inf")

    def attempt(size: int) -> bool:
        nonlocal fastest
        _clean(device)
        available = memory.free(device)
        found = forecast(model, make_data(size), batches=3, **options)
        seconds, slowest = found.seconds_working / found.samples, _GAIN * fastest
        fastest = min(fastest, seconds)
        return (available is None or found.memory <= _ROOM * available) and seconds <= slowest

    best = memory.largest_that_fits(attempt, most)
    _clean(device)
    if not best:
        advice = "Use a smaller model or precision, fewer `parameters`, or shorter inputs."
        raise MemoryError(message("model", "one that fits into memory", "too little room for a single sample", advice))
    return best


class _BatchTimer:
    """Seconds spent waiting for each batch and working on it, and the memory that the largest one takes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting: list[float] = []
        self.working: list[float] = []
        self.item: object = None  # the largest batch
        self._largest = -1

    def timed(self, items: Iterable[object]) -> Iterator[object]:
        """Yield the items and take the time, until all together have taken more than `_LONG` seconds."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = self._now()
        for item in items:
            begun = self._now()
            self.waiting.append(begun - start)
            self._remember(item)
            yield item
            start = self._now()
            self.working.append(start - begun)
            if sum(self.working) > _LONG:
                return

    def peak(self, run: Callable[[Iterable[object]], object]) -> int:
        """Peak memory in bytes: of the batches so far on a GPU, else of the largest one, run again."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        memory_mode = PeakMemory()
        with memory_mode, suppress(ValueError):  # none of its samples counts: the batch has run by then
            run([self.item] * (3 if self.working[0] < _LONG else 1))  # the third is verified with all sums there
        return memory_mode.most

    def _remember(self, item: object) -> None:
        """Keep the batch with the most numbers, for `peak`."""
        numbers = sum(tensor.numel() for tensor in tensors_in(item))
        if numbers > self._largest and self.device.type != "cuda":
            self.item, self._largest = item, numbers

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _clean(device: torch.device) -> None:
    """Free what an attempt has left: otherwise the next one has less memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def duration(seconds: float) -> str:
    """A duration in the unit that fits it: 3.2 ms, 4.5 s, 12 min, 3 h 20 min."""
    if seconds < 1:
        return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
