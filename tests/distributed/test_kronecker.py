"""`nm.fisher_kronecker` by several processes gives the result of one: to rounding, in a basis that all have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import neuromanifold as nm
from tests.distributed import runs
from tests.distributed.launch import checked_values

NUMBER = 7  # the last round is not full, and the last batch does not use all layers
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"estimator": nm.Exact()},
    "default": {},
    "adaptive": {"estimator": nm.Adaptive(1.5)},
    "factors": {"eigenvalues": "kronecker", "weight_sharing": "reduce"},
    "a shard of factors": {"eigenvalues": "kronecker", "shard": (1, 2)},
    "limits": {"max_side": 7, "max_block": 4},
}


def load(path: Path) -> nm.KroneckerFisher:
    found = nm.load(path)
    assert isinstance(found, nm.KroneckerFisher)
    return found


def assert_same(found: nm.KroneckerFisher, expected: nm.KroneckerFisher) -> None:
    assert (found.count, found.structure) == (expected.count, expected.structure)
    p, q = found.provenance, expected.provenance
    assert (p.batches, p.passes, p.draws) == (q.batches, q.passes, q.draws)
    difference = found.kronecker.dense() - expected.kronecker.dense()
    assert float(difference.norm() / expected.dense().norm()) < 1e-5
    assert float((found.dense() - expected.dense()).norm() / expected.dense().norm()) < 1e-4  # bases may turn


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    calls: list[Any] = []
    for kind, options in OPTIONS.items():
        (folder / kind).mkdir()
        calls.append((runs.kronecker, folder / kind, NUMBER, options))
    (folder / "kept").mkdir()
    calls.append((runs.kronecker, folder / "kept", NUMBER, {"checkpoint": nm.Checkpoint(folder / "state", every=0)}))
    assert checked_values(2, runs.several, calls) == [[""] * len(calls)] * 2
    return folder


@pytest.mark.parametrize("kind", OPTIONS)
def test_two_processes_give_the_result_of_one(kind: str, results: Path) -> None:
    first, second = (load(results / kind / str(rank)) for rank in range(2))
    assert_same(first, nm.fisher_kronecker(runs.heads(), runs.batches(NUMBER), **OPTIONS[kind]))
    assert first.provenance.processes == 2
    assert torch.equal(first.dense(), second.dense())  # every rank has the whole result, with the same bits
    if kind == "default":
        assert first.blocks["a.weight"].right is first.blocks["b.weight"].right  # one factor, in the file, too
        assert first.blocks["c.weight"].right is not first.blocks["b.weight"].right


def test_one_process_takes_up_what_two_have_begun(results: Path) -> None:
    checkpoint = nm.Checkpoint(results / "state", every=0)
    found = nm.fisher_kronecker(runs.heads(), runs.batches(NUMBER), checkpoint=checkpoint)
    assert_same(found, load(results / "kept" / "0"))


def test_each_process_with_data_of_its_own(tmp_path: Path) -> None:
    checked_values(2, runs.sampled_kronecker, tmp_path)
    loader = DataLoader(runs.loader(0, 32, 2).dataset, batch_size=8)
    expected = nm.fisher_kronecker(runs.heads(), list(loader), nm.Exact())
    found = load(tmp_path / "0")
    assert (found.count, found.provenance.processes) == (32, 2)
    assert float((found.dense() - expected.dense()).norm() / expected.dense().norm()) < 1e-4
