"""--batch-size auto: the largest batches that fit and help."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from neuromanifold.cli.options import Setup
from neuromanifold.core.checks import message
from neuromanifold.diagnostics.forecast import largest_batch
from neuromanifold.hf import FunctionData, LoadedData, LoadedModel


def sized_data(setup: Setup, model: LoadedModel, labels: bool | None, **options: Any) -> LoadedData | FunctionData:
    """The data in batches of the given size, or of one that is found by trying; `options` are those of the run."""
    if setup.size is not None:
        return setup.load_data(model, labels)
    every = dataclasses.replace(setup, batches=None).load_data(model, labels)
    if isinstance(every, FunctionData):
        advice = "Leave it out: the function says how large they are."
        raise ValueError(message("batch-size", "a number for batches of one's own", "auto", advice))
    size = largest_batch(model.module, every.with_batch_size, most=every.samples, **options)
    Console(stderr=True).print(f"Batch size: {size}", markup=False, highlight=False)
    return setup.load_data(model, labels, size)
