"""A run that is killed again and again, at random times, until it comes to its end; see `test_checkpoint.py`."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests import forked

BATCHES, PAUSE = 40, 0.004


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def batches(pause: float = 0.0) -> Iterator[Tensor]:
    for i in range(BATCHES):
        time.sleep(pause)
        yield torch.randn(16, 6, generator=torch.Generator().manual_seed(i))


class BrokenError(Exception):
    """What happens to a run."""


def failing(data: list[Any], at: int) -> Iterator[Any]:
    """Data that fail before batch number `at`."""
    for number, item in enumerate(data):
        if number == at:
            raise BrokenError
        yield item


def run(folder: Path) -> None:
    checkpoint = nm.Checkpoint(folder / "run.checkpoint", every=0)
    nm.fisher_diagonal(network(), batches(PAUSE), checkpoint=checkpoint).save(folder / "result.safetensors")


def killed(folder: Path, kills: int, seed: int) -> int:
    """Kill as often as asked, then let it end; gives how often it was killed while at work."""
    chance, killed = random.Random(seed), 0
    for _ in range(10 * kills):
        child = forked.start(partial(run, folder), sys.__stdout__, sys.__stderr__)
        if killed < kills:
            time.sleep(chance.uniform(0, BATCHES * PAUSE / 4))
            os.kill(child, signal.SIGKILL)
        code = forked.returncode(child)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
    return killed
