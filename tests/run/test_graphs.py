"""When batches are captured, replayed, compared and run eagerly; on a GPU: benchmarks/gpu_session.py."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums, Tally
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.run import loop
from neuromanifold.run.graphs import CapturedSteps, _CapturedBatch
from neuromanifold.run.methods import Method, make_method
from neuromanifold.run.settings import Settings
from tests.persample.test_late_gradients import Gated, gated_data
from tests.problems.graphs import CapturedOnCpu, CpuRecorder, Graph
from tests.run.test_contract import X, Y
from tests.run.test_contract import network as contract_network
from tests.run.test_samplewise import assert_same

Runs = tuple[nm.DiagonalFisher, nm.DiagonalFisher]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[nm.DiagonalFisher, nm.DiagonalFisher]]:
    """The same run without CUDA graphs, and with them."""
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)

    def run(model: nn.Module, data: list[Any]) -> tuple[nm.DiagonalFisher, nm.DiagonalFisher]:
        def unchecked(z: Tensor) -> nm.Categorical:
            return nm.Categorical(z, validate=False)

        one, two = (
            nm.fisher_diagonal(model, data, nm.Hutchinson(deflate=0), unchecked, cuda_graphs=r) for r in (False, True)
        )
        return one, two

    return run


def assert_equal(found: nm.DiagonalFisher, expected: nm.DiagonalFisher) -> None:
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found.stderr[name], expected.stderr[name], msg=lambda t, n=name: f"{n} error: {t}")


def test_the_stand_in_replays_as_a_graph_does(both):
    expected, found = both(network(), list(inputs(12, 4, 3, 6)))
    assert CapturedOnCpu.last.replayed >= 5
    assert_equal(found, expected)


def test_graphs_follow_a_change_of_units(both):
    """A graph has the unit of its time in it; after larger gradients its fourth powers are too large."""
    small, large = list(0.01 * inputs(20, 4, 6)), inputs(3, 6) * 10
    expected, found = both(nn.Linear(6, 3), [*small[:7], large, *small[7:]])
    assert CapturedOnCpu.last.replayed
    assert_equal(found, expected)


def test_graphs_add_to_sums_that_are_still_looked_at(both):
    """With more than eight layouts of small parameters the sums move elsewhere, and graphs add to the old ones."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(6, 5), nn.ModuleList(nn.Linear(5, 3) for _ in range(10))

        def forward(self, x: Tensor, task: int) -> Tensor:
            out: Tensor = self.heads[task](self.trunk(x).tanh())
            return out

    tasks = [0] * 5 + list(range(1, 10)) + [0] * 6
    data = [{"x": x, "task": task} for x, task in zip(inputs(len(tasks), 4, 6), tasks, strict=True)]
    expected, found = both(Tasks(), data)
    assert CapturedOnCpu.last.replayed
    assert_equal(found, expected)


class Opaque(torch.autograd.Function):
    """An operation that samples cannot be followed through."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        return g


def test_a_model_that_is_verified_with_every_batch_is_not_captured(both: Callable[..., Runs]) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Opaque.apply(super().forward(x))
            return out

    with pytest.warns(nm.NotCapturedWarning, match="falls back to eager, because samples cannot be followed"):
        expected, found = both(Model(6, 3), list(inputs(6, 4, 6)))
    assert found.provenance.verified == 6
    assert_equal(found, expected)


def test_a_capture_that_fails_leaves_nothing_behind(both):
    """Gradients that small sums had taken by then are squared with the next batch; on a GPU they are garbage."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            if hidden.requires_grad:
                hidden.register_hook(lambda g: g * min(1.0, 1e9 / g.abs().max().item()))
            out: Tensor = self.last(hidden)
            return out

    with pytest.warns(nm.NotCapturedWarning, match="because the model waits for the device|because RuntimeError"):
        expected, found = both(Model(), list(inputs(12, 4, 6)))
    assert not CapturedOnCpu.last.replayed
    assert_equal(found, expected)


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_norm_whose_width_is_the_sequence_length_is_captured(both: Callable[..., Runs], channels_first: bool) -> None:
    """Which dimension its weight scales is then found by its values, which no later batch may read back."""

    class OwnLayerNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT).mT if channels_first else super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = OwnLayerNorm(6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.norm(x).tanh().mean(1))
            return out

    model = Model()
    expected, found = both(model, list(inputs(12, 4, 6, 6)))
    assert CapturedOnCpu.last.replayed == 8
    assert set(found.provenance.granularity.values()) == {"sample"}
    assert_equal(found, expected)


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    ends = list(itertools.accumulate(sizes))
    return [(X[end - size : end], Y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def unchecked(z: Tensor) -> nm.Categorical:
    return nm.Categorical(z, validate=False)  # looking for NaN reads values back


@pytest.mark.parametrize("estimator", [nm.Exact(), nm.Empirical(), nm.Hutchinson(deflate=0), nm.MonteCarlo()], ids=repr)
@pytest.mark.parametrize("granularity", ["auto", "batch"])
def test_a_replayed_run_is_the_same(estimator: nm.Estimator, granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if granularity == "batch" and not estimator.centred:
        granularity = "sample"
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)
    data = batches([4] * 12 + [3, 5])  # in the end, other shapes
    expected, found = (
        nm.fisher_diagonal(contract_network(), data, estimator, unchecked, granularity=granularity, cuda_graphs=graphs)
        for graphs in (False, True)
    )
    assert_same(found, expected)
    for name in expected:
        torch.testing.assert_close(found.stderr[name], expected.stderr[name])
    assert found.provenance.passes == expected.provenance.passes
    assert CapturedOnCpu.last.replayed >= 5


def test_a_model_that_depends_on_more_than_its_inputs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)
    data, model = batches([4] * 16), contract_network()
    expected = nm.fisher_diagonal(model, data, nm.Exact(), unchecked)

    def right_before(number: int) -> Callable[..., bool]:
        def judge(_: CapturedSteps, captured: _CapturedBatch) -> bool:
            captured.compared = captured.replayed
            return captured.replayed < number

        return judge

    for wrong_at in (1, 2):  # before anything wrong has been added
        monkeypatch.setattr(CapturedOnCpu, "_is_right", right_before(wrong_at))
        with pytest.warns(nm.NotCapturedWarning, match="depends on more than its inputs"):
            found = nm.fisher_diagonal(model, data, nm.Exact(), unchecked, cuda_graphs=True)
        assert_same(found, expected)
    for wrong_at in (8, 12):  # the eighth, and the last one
        monkeypatch.setattr(CapturedOnCpu, "_is_right", right_before(wrong_at))
        with pytest.raises(RuntimeError, match="cuda_graphs=False"):
            nm.fisher_diagonal(model, data, nm.Exact(), unchecked, cuda_graphs=True)


def test_replayed_logits_are_compared_with_the_models_own() -> None:
    model, sums = contract_network(), DiagonalSums([], False)
    problem = Problem.of(model, [X[:4]], nm.Categorical)
    method = make_method(problem, Settings(nm.Exact()), tokens=True)
    captured, batch = CapturedSteps(method, sums, True, CpuRecorder(method.generator)), Batch((X[:4],), {}, None)

    def judged(logits: Tensor) -> bool:
        return captured._is_right(
            _CapturedBatch(batch, Outputs(logits, None, None), None, 1, Tally([], []), None, None)
        )

    logits = model(X[:4]).detach()
    assert judged(logits)
    assert judged(logits * (1 + 1e-16))
    assert not judged(logits * 1.001)
    assert not judged(model(X[4:8]).detach())


def test_models_with_hooks_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)
    model, seen = contract_network(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(nm.NotCapturedWarning, match="hooks"):
        nm.fisher_diagonal(model, batches([4] * 10), nm.Exact(), unchecked, cuda_graphs=True)
    assert CapturedOnCpu.last.replayed == 0
    assert len(seen) >= 10


def test_hooks_that_transformers_install_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)
    model = contract_network()

    def note_output(*_: object) -> None: ...

    note_output.__module__ = "transformers.utils.output_capturing"
    model.register_forward_hook(note_output)
    nm.fisher_diagonal(model, batches([4] * 10), nm.Exact(), unchecked, cuda_graphs=True)
    assert CapturedOnCpu.last.replayed > 0


@pytest.mark.parametrize(
    "odd", [object(), float, torch.ones(3).to_sparse(), [1, {2}]], ids=["object", "type", "sparse", "set"]
)
def test_batches_with_odd_things_run_eagerly(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor, odd: Any) -> Tensor:
            del odd
            out: Tensor = self.last(x)
            return out

    data = [{"x": x, "odd": odd} for x in inputs(6, 4, 6)]
    nm.fisher_diagonal(Model(), data, nm.Exact(), unchecked, cuda_graphs=True)
    assert CapturedOnCpu.last.replayed == 0


def test_without_a_gpu_graphs_change_nothing() -> None:
    data, model = batches([4] * 6), contract_network()
    assert_same(nm.fisher_diagonal(model, data, cuda_graphs=True), nm.fisher_diagonal(model, data), rtol=0)


def test_whether_graphs_are_captured_is_yes_no_or_auto() -> None:
    with pytest.raises(ValueError, match="`cuda_graphs` must be True, False or 'auto'"):
        nm.fisher_diagonal(contract_network(), batches([4]), cuda_graphs="always")  # type: ignore[arg-type]


class Asks(nn.Module):
    """Asks whether it is being captured, forward and backward; looks at its inputs if it is not and if it should."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.layers, self.looks = network(), looks
        self.answers: tuple[list[bool], list[bool]] = ([], [])

    def forward(self, x: Tensor) -> Tensor:
        self.answers[0].append(torch.cuda.is_current_stream_capturing())
        if self.looks and not self.answers[0][-1] and not bool(x.isfinite().all()):
            raise ValueError
        x = self.layers(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.answers[1].append(torch.cuda.is_current_stream_capturing()))
        return x


def replayed_asks(model: Asks, data: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> nm.DiagonalFisher:
    monkeypatch.setattr(loop, "CapturedSteps", CapturedOnCpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # also where there is no CUDA
    return nm.fisher_diagonal(model, data, nm.Hutchinson(deflate=0), unchecked, cuda_graphs=True)


def test_a_model_is_not_told_of_a_capture_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of `transformers` that are told mask where nothing is hidden."""
    model = Asks()
    monkeypatch.setattr(Graph, "__enter__", told_the_truth(Graph.__enter__))
    replayed_asks(model, list(inputs(9, 4, 3, 6)), monkeypatch)
    assert CapturedOnCpu.last.replayed >= 3
    assert set(model.answers[0]) == {False}


def told_the_truth(enter: Callable[[Graph], Graph]) -> Callable[[Graph], Graph]:
    """As on a GPU: whoever asks during a capture is told so."""

    def entered(graph: Graph) -> Graph:
        torch.cuda.is_current_stream_capturing = lambda: True
        return enter(graph)

    return entered


def test_a_model_that_looks_at_values_is_told_that_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model, and not what comes after it: kernels must make their tables in the first batch."""
    model, data = Asks(looks=True), list(inputs(12, 4, 3, 6))
    found = replayed_asks(model, data, monkeypatch)
    assert CapturedOnCpu.last.replayed >= 3
    answers = model.answers[0]
    assert answers == sorted(answers)  # first no, then yes
    assert set(answers) == {False, True}
    assert set(model.answers[1]) == {False}
    assert_equal(found, nm.fisher_diagonal(Asks(), data, nm.Hutchinson(deflate=0), unchecked))


def test_graphs_of_a_model_that_was_not_told_are_not_used_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kind of batches makes it look at values."""

    class Sometimes(Asks):
        def forward(self, x: Tensor) -> Tensor:
            self.looks = len(x) == 2
            return super().forward(x)

    one, other = list(inputs(5, 4, 3, 6)), list(inputs(5, 2, 3, 6))
    data = [*one, *other, *one, *other]
    found = replayed_asks(Sometimes(), data, monkeypatch)
    assert CapturedOnCpu.last.replayed >= 6  # once more captured where all fourth powers are taken
    assert len(CapturedOnCpu.last._graphs) >= 2
    assert_equal(found, nm.fisher_diagonal(Asks(), data, nm.Hutchinson(deflate=0), unchecked))


@pytest.mark.parametrize("open_from", [3, 12, 18, 20], ids=["early", "late", "at the end", "never"])
def test_gradients_that_come_late_are_verified(open_from: int, both: Callable[..., Runs]) -> None:
    """While batches are captured nothing is read back."""
    expected, found = both(Gated().double(), gated_data(open_from, 20))  # a warning would be an error
    assert CapturedOnCpu.last.replayed >= 8
    assert_equal(found, expected)


def test_replayed_batches_count_as_many_samples_as_they_have(both: Callable[..., Runs]) -> None:
    """Which batches have their fourth powers taken depends on how many samples have been seen."""
    many, few = list(inputs(4, 24, 6)), list(inputs(60, 2, 6, seed=1))
    data = [*few[:6], *many, *few[6:]]
    wide = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 600), nn.Tanh(), nn.Linear(600, 5))
    expected, found = both(wide, data)
    assert CapturedOnCpu.last.replayed >= 20
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("times", "wanted", "replayed"),
    [
        ([(0.9, 1.0), *[(0.0, 0.5)] * 3], "auto", 9),
        ([(0.9, 1.0), (0.0, 2.0), (0.0, 1.02), (0.0, 2.0)], "auto", 9),  # the shortest replay counts
        ([(0.9, 1.0), *[(0.0, 1.1)] * 3], "auto", 6),
        ([(0.5, 1.0)], "auto", 0),
        ([], True, 9),
    ],
    ids=["faster", "as fast", "slower", "the device does not wait", "asked for"],
)
def test_graphs_are_captured_only_if_they_pay(
    times: list[tuple[float, float]], wanted: Any, replayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 13 batches two are verified, and two run eagerly before the capture; nothing else is timed."""
    data, made, seconds = batches([4] * 13), [], iter(times)

    def captured(method: Method, sums: GradientSums, _: Any) -> CapturedSteps:
        made.append(CapturedSteps(method, sums, wanted, CpuRecorder(method.generator, seconds)))
        return made[-1]

    expected = nm.fisher_diagonal(contract_network(), data, nm.Exact(), unchecked)
    monkeypatch.setattr(loop, "CapturedSteps", captured)
    assert_same(nm.fisher_diagonal(contract_network(), data, nm.Exact(), unchecked, cuda_graphs=True), expected)
    assert made[0].replayed == replayed
    assert next(seconds, None) is None
