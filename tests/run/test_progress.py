"""An observer is told how far a run is."""

import pytest
import torch
from torch import nn

import neuromanifold as nm
from neuromanifold.run.counts import Reporter
from neuromanifold.run.settings import RunProgress


def problem() -> tuple[nn.Module, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 4)
    return model, [torch.randn(n, 3, generator=generator) for n in (5, 1, 3, 2)]


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuromanifold.run.counts._SECONDS", 0.0)
    monkeypatch.setattr("neuromanifold.run.counts._SHARE", 1e9)


@pytest.mark.usefixtures("every_batch")
def test_an_observer_sees_every_batch() -> None:
    model, data = problem()
    seen: list[RunProgress] = []
    result = nm.fisher_diagonal(model, data, progress=seen.append)
    assert [one.batches for one in seen] == [one.place for one in seen] == [1, 2, 3, 4]
    assert [one.samples for one in seen] == [5, 6, 9, 11]
    assert seen[-1].relative_error == pytest.approx(result.relative_error)
    silent = nm.fisher_diagonal(model, data)
    assert all(torch.equal(result[name], silent[name]) for name in silent)  # looking changes nothing


@pytest.mark.usefixtures("every_batch")
def test_places_count_the_batches_of_other_shards_and_exact_values_have_no_error() -> None:
    model, data = problem()
    seen: list[RunProgress] = []
    nm.fisher_diagonal(model, data, nm.Exact(), progress=seen.append, shard=(1, 2))
    assert [(one.batches, one.place, one.samples) for one in seen] == [(1, 2, 1), (2, 4, 3)]
    assert {one.relative_error for one in seen} == {None}


@pytest.mark.usefixtures("every_batch")
def test_an_observer_and_a_target_accuracy_go_together() -> None:
    model, data = problem()
    seen: list[RunProgress] = []
    result = nm.fisher_diagonal(model, data, rtol=100.0, progress=seen.append)
    assert result.provenance.stopped.startswith("stopped after 1 batches")
    assert len(seen) == 1


def test_looking_is_rare() -> None:
    calls: list[RunProgress] = []
    reporter = Reporter(calls.append)
    for i in range(1000):
        reporter.batch_done(lambda i=i: RunProgress(i, i, i, None))  # type: ignore[misc]
    assert [one.batches for one in calls] == [0]  # the next one is due in half a second


def test_something_else_is_refused() -> None:
    model, data = problem()
    with pytest.raises(TypeError, match="`progress` must be True, False, or a function"):
        nm.fisher_diagonal(model, data, progress="yes")  # type: ignore[arg-type]
