"""Seconds per batch of each column: interleaved, so that a busy machine slows all of them; medians.

for each round:
    for each column:
        run over a few batches that are on the device; note the time from one batch to the next
the first batch of a run, in which the plan is made, does not count; on a GPU the first nine, since the first eight are
synchronized

On a CPU processor time is taken, which other processes lengthen less than wall-clock time.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from neuromanifold.experiments.paper.columns import COLUMNS, EXACT, Column
from neuromanifold.experiments.paper.folder import TIMING_ROUNDS, Folder
from neuromanifold.experiments.paper.sources import Prepared
from neuromanifold.problem.batches import model_device
from neuromanifold.run.fisher import fisher_diagonal
from neuromanifold.run.methods import SlowPathWarning

LEFT_OUT, TIMED = 1, 2  # batches at the beginning of a run, and those that count in each round
_LEFT_OUT_ON_GPU, _TIMED_ON_GPU = 9, 4
_FEW = 8  # passes: what takes more is timed once


def measure_speed(prepared: Prepared, folder: Folder, rounds: int = TIMING_ROUNDS) -> dict[str, Any]:
    """Time every column; the result is kept in speed.json and read from there the next time."""
    kept = folder.numbers(prepared.name, "speed")
    if kept is not None:
        return kept
    device = model_device(prepared.module)
    gpu = device.type == "cuda"
    left_out, timed = (_LEFT_OUT_ON_GPU, _TIMED_ON_GPU) if gpu else (LEFT_OUT, TIMED)
    batches = [_ready(batch, device) for batch in prepared.batches(left_out + timed)]
    often = (EXACT, *COLUMNS) if prepared.classes <= _FEW else COLUMNS
    seconds: dict[str, list[float]] = {column.key: [] for column in (EXACT, *COLUMNS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        for column in COLUMNS:  # compile kernels and allocate memory before the first round
            _seconds(prepared, column, batches if gpu else batches[:1], device, left_out)
        for _ in range(rounds):
            for column in often:
                seconds[column.key] += _seconds(prepared, column, batches, device, left_out)
        if EXACT not in often:
            seconds[EXACT.key] += _seconds(prepared, EXACT, batches[:2], device, 1)
    values = {
        "seconds": {key: median(found) for key, found in seconds.items()},
        "batches_timed": {key: len(found) for key, found in seconds.items()},
        "batch_size": prepared.data.batch_size,
        "rounds": rounds,
        "device": _device_name(device),
    }
    return folder.keep(prepared.name, "speed", "speed", values)


def _device_name(device: torch.device) -> str:
    """The name of the GPU, or the CPU with its number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}, processor time"


def _ready(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on the device, with labels: zeros where the data have none, since only the time is of interest."""
    samples = len(next(iter(batch.values())))
    labels = batch.get("labels", torch.zeros(samples, dtype=torch.int64))
    return {name: value.to(device) for name, value in {**batch, "labels": labels}.items()}


def _seconds(
    prepared: Prepared, column: Column, batches: list[dict[str, Tensor]], device: torch.device, left_out: int
) -> list[float]:
    """The seconds of each batch but the first `left_out`."""
    moments: list[float] = []
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def noted() -> Iterator[dict[str, Tensor]]:
        for batch in [*batches, None]:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            moments.append(clock())
            if batch is not None:
                yield batch

    fisher_diagonal(
        prepared.module, noted(), column.estimator, prepared.model.likelihood, granularity=column.granularity
    )
    return [after - before for before, after in pairwise(moments[left_out:])]
