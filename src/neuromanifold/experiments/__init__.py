"""Experiments: the paper's table and figures, on models and data that anyone has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on a single thread inside this context.

    Operations as small as those of a demo gain next to nothing from a second thread, and take up to a hundred times as
    long with it where something else keeps the cores busy, since the threads wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
