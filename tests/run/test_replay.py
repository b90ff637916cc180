"""When work is recorded, replayed, compared and given up; CUDA graphs themselves are tried by benchmarks/gpu_checks.py.

The stand-in for a recorder does at once what is recorded, takes it back, and does it again when it is replayed.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import neuromanifold as nm
from neuromanifold.pullback.sums import DiagonalSums
from neuromanifold.run import loop
from neuromanifold.run.batches import Batch, Outputs
from neuromanifold.run.replay import Replay
from neuromanifold.run.step import Step
from tests.run.test_contract import X, Y, network
from tests.run.test_samplewise import assert_same


@dataclass
class Graph:
    """Does what it is told to when it is replayed."""

    replay: Callable[[], None] = lambda: None


@dataclass
class Recorder:
    """Forward and the rest, in turns."""

    step: Step
    sums: DiagonalSums
    fails: bool = False
    made: list[Graph] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[Graph]:
        graph, kept = Graph(), [vars(self.sums), self.step.generator.get_state()]
        kept[0] = copy.deepcopy({key: value for key, value in kept[0].items() if key != "_parameters"})
        self.made.append(graph)
        try:
            yield graph
            if self.fails:
                raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            vars(self.sums).update(kept[0])
            self.step.generator.set_state(kept[1])


class Watched(Replay):
    """Replays by calling the step again on the recorded batch's memory."""

    fails = False
    last: "Watched"

    def __init__(self, step: Step, sums: DiagonalSums) -> None:
        super().__init__(step, sums, Recorder(step, sums, self.fails))
        Watched.last = self

    def _record(self, key: object, batch: Batch, number: int) -> None:
        own: list[Batch] = []
        forward = self._step.forward
        self._step.forward = lambda batch, number: own.append(batch) or forward(batch, number)  # type: ignore
        try:
            super()._record(key, batch, number)
        finally:
            del self._step.forward
        recording = self._recordings.get(key)
        if recording is None:
            return
        held: list[Outputs] = []

        def again() -> None:
            held[:] = [self._step.forward(own[0], number)]
            recording.outputs.logits.copy_(held[0].logits.detach())

        def rest() -> None:
            before = self._step.squares.passes
            self._step.backward(held[0], number)
            self._step.squares.passes = before

        recording.forward.replay, recording.backward.replay = again, rest


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(loop, "Replay", Watched)
    monkeypatch.setattr(Watched, "fails", False)
    return Watched


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    ends = list(itertools.accumulate(sizes))
    return [(X[end - size : end], Y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical(), nm.Hutchinson(deflate=1), nm.MonteCarlo()], ids=repr)
@pytest.mark.parametrize("granularity", ["auto", "batch"])
def test_a_replayed_run_is_the_same(estimator: nm.Estimator, granularity: str, watched: type[Watched]) -> None:
    if granularity == "batch" and not estimator.centred:
        pytest.skip("refused")
    data = batches([4] * 12 + [3, 5])  # in the end, other shapes
    model = network()
    expected = nm.fisher_diagonal(model, data, estimator, granularity=granularity)
    found = nm.fisher_diagonal(model, data, estimator, granularity=granularity, replay=True)
    assert_same(found, expected)
    for name in expected:
        torch.testing.assert_close(found.stderr[name], expected.stderr[name])
    assert found.provenance.passes == expected.provenance.passes
    assert watched.last.replayed == 10


def test_what_cannot_be_recorded_is_done_as_always(watched: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "fails", True)
    data, model = batches([4] * 10), network()
    assert_same(nm.fisher_diagonal(model, data, nm.Exact(), replay=True), nm.fisher_diagonal(model, data, nm.Exact()))
    assert watched.last.replayed == 0
    assert len(watched.last._recorder.made) == 1  # and it is not tried again


def test_a_model_that_depends_on_more_than_its_inputs_is_seen(
    watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = batches([4] * 16), network()
    expected = nm.fisher_diagonal(model, data, nm.Exact())
    for wrong_at in (1, 2):  # before anything wrong has been added
        monkeypatch.setattr(watched, "_is_right", lambda self, *_, wrong_at=wrong_at: self.replayed < wrong_at)
        assert_same(nm.fisher_diagonal(model, data, nm.Exact(), replay=True), expected)
    monkeypatch.setattr(watched, "_is_right", lambda self, *_: self.replayed < 8)
    with pytest.raises(RuntimeError, match="replay=False"):
        nm.fisher_diagonal(model, data, nm.Exact(), replay=True)


def test_recorded_logits_are_compared_with_the_models_own() -> None:
    model = network()
    step = Step(
        model, dict(model.named_parameters()), _settings(), DiagonalSums(list(model.parameters()), False), X.device
    )
    replay = Replay(step, DiagonalSums([], False), Recorder(step, DiagonalSums([], False)))
    logits = model(X[:4]).detach()
    batch = Batch((X[:4],), {}, None)
    kept = {"labels": None, "valid": None}

    def judged(logits: Tensor) -> bool:
        recording: Any = type("Recording", (), {"outputs": Outputs(logits, **kept)})
        return replay._is_right(recording, batch)

    assert judged(logits)
    assert judged(logits * (1 + 1e-15))
    assert not judged(logits * 1.001)
    assert not judged(model(X[4:8]).detach())


def _settings() -> Any:
    from neuromanifold.run.step import Settings

    return Settings(nm.Exact(), nm.Categorical)


def test_models_with_hooks_are_not_recorded(watched: type[Watched]) -> None:
    model, seen = network(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    nm.fisher_diagonal(model, batches([4] * 10), nm.Exact(), replay=True)
    assert watched.last.replayed == 0
    assert len(seen) >= 10


def test_without_a_gpu_replay_changes_nothing() -> None:
    data, model = batches([4] * 6), network()
    assert_same(nm.fisher_diagonal(model, data, replay=True), nm.fisher_diagonal(model, data), rtol=0)
