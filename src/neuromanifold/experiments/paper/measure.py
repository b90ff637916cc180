"""One estimator of a task: run, compare with the exact diagonal, keep."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.diagnostics.trials import EPSILON, short_name
from neuromanifold.experiments.paper.columns import COLUMNS, EXACT, Column, curve
from neuromanifold.experiments.paper.folder import Folder, versions
from neuromanifold.experiments.paper.sources import Prepared
from neuromanifold.problem.progress import Observer
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.comparison import compare
from neuromanifold.results.diagonal import load_diagonal
from neuromanifold.run.fisher import fisher_diagonal

Watch = Callable[[str, object], AbstractContextManager[Observer | bool]]
"""Called with the name of a run and its data; returns a context with the run's `progress` argument."""

_LOOKED_AT = 4  # batches that `describe` evaluates


def wanted_columns(prepared: Prepared, most_probes: int | None = None) -> list[Column]:
    """The table's columns, and those of the curve up to so many probes; without labels those that need none."""
    found = [*COLUMNS, *curve(prepared.classes, most_probes)[1:]]
    return [column for column in found if prepared.labelled or not column.estimator.needs_labels]


def exact_diagonal(prepared: Prepared, folder: Folder, seed: int, watch: Watch) -> DiagonalFisher:
    """The reference of all errors: made once, and read from then on."""
    task, path = prepared.task.name, folder.file(prepared.task.name, "exact.safetensors")
    if folder.numbers(task, EXACT.key) is not None and path.exists():
        return load_diagonal(path)
    result, seconds = _timed_diagonal(prepared, EXACT, folder, seed, watch)
    result.save(path)
    _keep_numbers(prepared, folder, EXACT, _column_numbers(prepared, EXACT, result, result, seconds))
    return result


def measure(
    prepared: Prepared, column: Column, exact: DiagonalFisher, folder: Folder, seed: int, watch: Watch, keep: bool
) -> dict[str, Any]:
    """Run a column and keep its errors; with `keep` its diagonal, too, if it is one of the table."""
    result, seconds = _timed_diagonal(prepared, column, folder, seed, watch)
    if keep and column in COLUMNS:
        result.save(folder.file(prepared.task.name, f"{column.key}.safetensors"))
    return _keep_numbers(prepared, folder, column, _column_numbers(prepared, column, result, exact, seconds))


def parameter_groups(module: nn.Module) -> dict[str, list[str]]:
    """All parameters, embeddings, and the rest: the row of a rare token has the noise of one or two samples."""
    tables = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding)}
    every = {name: id(parameter) for name, parameter in module.named_parameters() if parameter.requires_grad}
    groups = {
        "all": list(every),
        "rest": [name for name, own in every.items() if own not in tables],
        "embeddings": [name for name, own in every.items() if own in tables],
    }
    return {group: names for group, names in groups.items() if names}


@torch.no_grad()
def describe(prepared: Prepared, folder: Folder) -> dict[str, Any]:
    """How confident and how accurate the network is: a wrong order of classes would show."""
    kept = folder.numbers(prepared.task.name, "facts")
    if kept is not None:
        return kept
    module = prepared.module
    device = next(module.parameters()).device
    largest: list[Tensor] = []
    right: list[Tensor] = []
    for batch in prepared.batches(min(_LOOKED_AT, len(prepared.data))):
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        probabilities = module(**inputs).logits.cpu().double().softmax(-1)
        largest.append(probabilities.max(-1).values)
        if prepared.labelled:
            right.append((probabilities.argmax(-1) == batch["labels"]).double())
    facts = {
        "mean_largest_probability": float(torch.cat(largest).mean()),
        "accuracy": float(torch.cat(right).mean()) if right else None,
        "looked_at": sum(len(one) for one in largest),
    }
    return folder.keep(prepared.task.name, "facts", "facts", facts)


def _timed_diagonal(
    prepared: Prepared, column: Column, folder: Folder, seed: int, watch: Watch
) -> tuple[DiagonalFisher, float]:
    """The diagonal, and its seconds (since the run was last resumed)."""
    task = prepared.task.name
    with watch(f"{task}: {column.text}, per {column.per}", prepared.data) as progress:
        start = time.perf_counter()
        result = fisher_diagonal(
            prepared.module,
            prepared.data,
            column.estimator,
            likelihood=prepared.model.likelihood,
            granularity=column.granularity,
            reduction="sum",
            seed=seed,
            progress=progress,
            checkpoint=folder.file(task, f"{column.key}.checkpoint"),
        )
        seconds = time.perf_counter() - start
    p = result.provenance
    named = p.named(f"{prepared.model.about} ({p.model})", prepared.data.about)
    return replace(result, provenance=named), seconds


def _column_numbers(
    prepared: Prepared, column: Column, result: DiagonalFisher, exact: DiagonalFisher, seconds: float
) -> dict[str, Any]:
    p = result.provenance
    per_batch = [name for name, granularity in p.granularity.items() if granularity == "batch"]
    groups = parameter_groups(prepared.module)
    return {
        "estimator": short_name(column.estimator),
        "per": column.per,
        "target": p.target,
        "random": column.estimator.noise_factor > 0,
        "passes": p.passes / p.batches,
        "batches": p.batches,
        "samples": result.count,
        "seed": p.seeds,
        "relative_error": result.relative_error,
        "without_rule": per_batch if column.per == "sample" else [],
        "errors": {group: _group_errors(result, exact, names) for group, names in groups.items()},
        "seconds": seconds,
        "device": p.device,
        "versions": versions(),
    }


def _group_errors(result: DiagonalFisher, exact: DiagonalFisher, names: list[str]) -> dict[str, Any]:
    """Errors of sums over the samples, with the paper's ε."""
    mine, theirs = ({name: one.sums[name] for name in names} for one in (result, exact))
    return asdict(compare(mine, theirs, EPSILON))


def _keep_numbers(prepared: Prepared, folder: Folder, column: Column, numbers: dict[str, Any]) -> dict[str, Any]:
    """Write the numbers of a column, which marks it as finished, and remove its checkpoint."""
    task = prepared.task.name
    folder.keep(task, column.key, "column", numbers)
    folder.file(task, f"{column.key}.checkpoint").unlink(missing_ok=True)
    return numbers
