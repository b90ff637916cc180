"""One estimator of a task: run, compare with the exact diagonal, keep."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from neuromanifold.diagnostics.runs import EPSILON, short_name
from neuromanifold.experiments.paper.columns import COLUMNS, EXACT, Column, curve
from neuromanifold.experiments.paper.folder import PaperRun, versions
from neuromanifold.experiments.paper.sources import Prepared
from neuromanifold.results import DiagonalFisher
from neuromanifold.results.comparison import compare
from neuromanifold.results.diagonal import load_diagonal
from neuromanifold.run.fisher import fisher_diagonal

_DESCRIBED = 4  # batches that `describe` evaluates


def wanted_columns(prepared: Prepared, most_probes: int | None = None) -> list[Column]:
    """The table's columns, and those of the curve up to so many probes; without labels those that need none."""
    found = [*COLUMNS, *curve(prepared.classes, most_probes)[1:]]
    return [column for column in found if prepared.labelled or not column.estimator.needs_labels]


def exact_diagonal(run: PaperRun, prepared: Prepared) -> DiagonalFisher:
    """The reference of all errors: computed once, and read from then on."""
    path = run.folder.file(prepared.name, "exact.safetensors")
    if run.folder.numbers(prepared.name, EXACT.key) is not None and path.exists():
        return load_diagonal(path)
    result, seconds = _timed_diagonal(run, prepared, EXACT)
    result.save(path)
    _keep_numbers(run, prepared, EXACT, result, result, seconds)
    return result


def measure(run: PaperRun, prepared: Prepared, column: Column, exact: DiagonalFisher) -> dict[str, Any]:
    """Run a column and keep its errors; its diagonal, too, if it is one of the table and `run.keep` says so."""
    result, seconds = _timed_diagonal(run, prepared, column)
    if run.keep and column in COLUMNS:
        result.save(run.folder.file(prepared.name, f"{column.key}.safetensors"))
    return _keep_numbers(run, prepared, column, result, exact, seconds)


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
def describe(run: PaperRun, prepared: Prepared) -> dict[str, Any]:
    """How confident and how accurate the network is: a wrong order of classes would show."""
    kept = run.folder.numbers(prepared.name, "facts")
    if kept is not None:
        return kept
    module, largest, correct = prepared.module, list[Tensor](), list[Tensor]()
    device = next(module.parameters()).device
    for batch in prepared.batches(min(_DESCRIBED, len(prepared.data))):
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        probabilities = module(**inputs).logits.cpu().double().softmax(-1)
        largest.append(probabilities.amax(-1))
        if prepared.labelled:
            correct.append((probabilities.argmax(-1) == batch["labels"]).double())
    facts = {
        "mean_largest_probability": float(torch.cat(largest).mean()),
        "accuracy": float(torch.cat(correct).mean()) if correct else None,
        "samples": sum(map(len, largest)),
    }
    return run.folder.keep(prepared.name, "facts", "facts", facts)


def _timed_diagonal(run: PaperRun, prepared: Prepared, column: Column) -> tuple[DiagonalFisher, float]:
    """The diagonal, and its seconds (since the run was last resumed)."""
    with run.progress(f"{prepared.name}: {column.text}, per {column.per}", prepared.data) as progress:
        start = time.perf_counter()
        result = fisher_diagonal(
            prepared.module,
            prepared.data,
            column.estimator,
            likelihood=prepared.model.likelihood,
            granularity=column.granularity,
            reduction="sum",
            seed=run.folder.settings.seed,
            progress=progress,
            checkpoint=run.folder.file(prepared.name, f"{column.key}.checkpoint"),
        )
        seconds = time.perf_counter() - start
    p = result.provenance
    named = p.named(f"{prepared.model.about} ({p.model})", prepared.data.about)
    return replace(result, provenance=named), seconds


def _keep_numbers(
    run: PaperRun, prepared: Prepared, column: Column, result: DiagonalFisher, exact: DiagonalFisher, seconds: float
) -> dict[str, Any]:
    """Write the numbers of a column: errors of sums over the samples with the paper's ε, cost, versions."""
    p, errors = result.provenance, {}
    for group, names in parameter_groups(prepared.module).items():
        mine, theirs = ({name: one.sums[name] for name in names} for one in (result, exact))
        errors[group] = asdict(compare(mine, theirs, EPSILON))
    per_batch = [name for name, granularity in p.granularity.items() if granularity == "batch"]
    numbers = {
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
        "errors": errors,
        "seconds": seconds,
        "device": p.device,
        "versions": versions(),
    }
    return run.folder.keep(prepared.name, column.key, "column", numbers)
