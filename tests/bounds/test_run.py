"""`nm.fisher_bounds` against the dense reference on many networks; every inequality; and its contract."""

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.bounds.kept_gradients import KeptGradients
from neuromanifold.bounds.result import Row
from neuromanifold.bounds.splitting import split
from neuromanifold.core.checks import message
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.problem import Problem as FisherProblem
from neuromanifold.reference import bounds as reference
from neuromanifold.reference.network import by_name, jacobian
from tests.problems.architectures import ARCHITECTURES
from tests.problems.networks import PROBLEMS
from tests.problems.problem import Net, Problem
from tests.run.test_contract import MODEL, X, Y, batches, network

CATEGORICAL = {name: problem for name, problem in PROBLEMS.items() if problem.likelihood is nm.Categorical}
CATEGORICAL |= {name: ARCHITECTURES[name] for name in ("DistilBERT", "GPT-2 (tokens, tied)", "ViT")}


def bounds(problem: Problem, **options: object) -> nm.NetworkBounds:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nm.fisher_bounds(problem.model, problem.data, **problem.options, **options)


def numbers(row: Row) -> list[float]:
    return [value for value in row[2:5] if isinstance(value, float)]


def assert_ordered(result: nm.NetworkBounds, slack: float = 1e-9) -> None:
    """lower <= actual <= upper in every row, for every rank."""
    scale = result.rows[0].upper
    assert scale is not None
    for rank in range(1, result.classes):
        assert result.lower_trace(rank) <= result.rows[0].actual * (1 + slack)
        for row in (*result.rows, *result.lower_error(rank)):
            for small, large in ((row.lower, row.actual), (row.actual, row.upper), (row.lower, row.upper)):
                if small is not None and large is not None:
                    assert small <= large + slack * scale, row


@pytest.mark.parametrize("name", CATEGORICAL)
def test_every_statement_is_that_of_the_dense_reference(name: str) -> None:
    problem = CATEGORICAL[name]
    J, z = jacobian(problem.model, problem.forward)
    labels = problem.labels_by_sample.flatten()
    for rank in {1, z.shape[-1] - 1}:
        result = bounds(problem, rank=rank).sum
        expected = reference.statements(J, z, labels, rank)
        rows = {row.statement: row for row in result.rows}
        tolerance = max(1e-8, 100 * problem.rtol) * expected[f"Prop. 5, rank {rank}"].upper
        for statement, values in expected.items():
            for kind, value in values._asdict().items():
                found = getattr(rows[statement], kind)
                assert (found is None) == math.isnan(value) or statement == "Prop. 10", (statement, kind)
                if found is not None:
                    assert found == pytest.approx(value, rel=1e-7, abs=tolerance), (statement, kind)
        assert_ordered(result, max(1e-9, 100 * problem.rtol))


@pytest.mark.parametrize("name", ["MLP", "CNN with BatchNorm", "LSTM", "tied embeddings", "segmentation, class_dim=1"])
def test_the_diagonals_are_those_of_the_dense_reference_and_in_order(name: str) -> None:
    problem = CATEGORICAL[name]
    J, z = jacobian(problem.model, problem.forward)
    result = bounds(problem, rank=1, actual="none").sum
    assert result.diagonals is not None
    for matrix, diagonal in zip(reference.dense_matrices(J, z, 1), result.diagonals, strict=True):
        for key, value in by_name(problem.model, matrix.diagonal()).items():
            torch.testing.assert_close(diagonal[key], value, rtol=1e-8, atol=1e-10)
    lower, actual, upper = result.diagonals
    for key in actual:
        assert bool((lower[key] <= actual[key]).all())
        assert bool((actual[key] <= upper[key]).all())
    traces = [float(one.trace) for one in result.diagonals]
    row = result.rows[0]
    assert traces == pytest.approx([row.lower, row.actual, row.upper])
    assert actual.provenance.estimator == repr(nm.Exact())
    assert result.mean.diagonals is not None
    assert float(result.mean.diagonals.actual.trace) == pytest.approx(traces[1] / result.count)


@pytest.mark.parametrize("name", ["MLP", "transformer encoder", "a module called twice", "LSTM", "position ids [1, T]"])
def test_groups_of_layers_do_not_matter(name: str) -> None:
    """One parameter at a time is as all of them at once; it takes more passes."""
    problem = CATEGORICAL[name]
    whole, parts = bounds(problem, diagonals=False, max_bytes=2**40), bounds(problem, diagonals=False, max_bytes=1)
    for a, b in zip(whole.terms, parts.terms, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert parts.costs[0].passes > whole.costs[0].passes


@pytest.mark.parametrize("name", ["samples mixed by BatchNorm", "time first", "nested dict inputs"])
def test_batches_that_cannot_be_split_and_those_that_can(name: str) -> None:
    """With next to no memory, samples are taken one at a time, or layers one at a time: the same numbers."""
    problem = CATEGORICAL[name]
    whole, parts = (bounds(problem, max_bytes=memory, actual="none") for memory in (2**40, 1))
    for a, b in zip(whole.terms, parts.terms, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert whole.diagonals is not None
    assert parts.diagonals is not None
    for key, value in whole.diagonals.upper.items():
        torch.testing.assert_close(parts.diagonals.upper[key], value)
    assert (whole.count, whole.positions) == (parts.count, parts.positions)


def test_a_batch_is_only_split_if_the_model_says_the_same() -> None:
    def parts(forward: Callable[..., Tensor], scale: Tensor, samples: int) -> list[Batch]:
        model = Net(forward, layer=nn.Linear(4, 3).double())
        batch = Batch((X[:4],), {"scale": scale, "other": [X[:4], "text"]}, Y[:4])
        problem = FisherProblem.of(model, [X])
        with problem.session():
            return split(problem, batch, problem.evaluate(batch).logits, samples)

    def scaled(m: Net, x: Tensor, scale: Tensor, other: object) -> Tensor:
        del other
        out: Tensor = m.layer(x) * scale[-1]
        return out

    def mixed(m: Net, x: Tensor, scale: Tensor, other: object) -> Tensor:
        return scaled(m, x - x.mean(0), scale, other)

    def failing(m: Net, x: Tensor, scale: Tensor, other: object) -> Tensor:
        if len(x) < 4:
            raise ValueError("too few")
        return scaled(m, x, scale, other)

    ones, table = torch.ones(3), torch.arange(4.0)  # as long as the batch: it would be cut
    assert parts(mixed, ones, 2) == []
    assert parts(scaled, table, 2) == []
    assert parts(failing, ones, 3) == []
    found = parts(scaled, ones, 3)
    assert [len(part.args[0]) for part in found] == [3, 1]
    assert torch.equal(torch.cat([part.labels for part in found if part.labels is not None]), Y[:4])


class _Masked(nn.Module):
    """Classes that are masked by large numbers, after samples have been mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x - x.mean(0)) - torch.tensor([0, 0, 1e9]).to(x)


class _ZeroPositions(nn.Module):
    """Position embeddings that begin as zeros, for positions [T]; their rows have gradients nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position, self.last = nn.Embedding(7, 5), nn.Embedding(4, 5), nn.Linear(5, 3)
        nn.init.zeros_(self.position.weight)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.word(ids) + self.position(positions)).mean(1))


class _MixedGradients(nn.Module):
    """Logits that do not depend on other samples, with gradients that do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.tanh(h + h.mean(0) - h.mean(0).detach()))


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("kind", [_Masked, _ZeroPositions, _MixedGradients])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_split_that_only_seems_to_work_is_noticed(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """Masked classes do not hide a difference, zeros do not hide a branch, and low precision does not hide both."""
    torch.manual_seed(0)
    ids = torch.randint(0, 7, (4, 4), generator=torch.Generator().manual_seed(0))
    inputs = {"ids": ids, "positions": torch.arange(4)} if kind is _ZeroPositions else X[:4].to(dtype)
    model = kind().to(dtype)
    whole, parts = (
        nm.fisher_bounds(model, [(inputs, Y[:4] % 2)], diagonals=False, actual="none", max_bytes=memory)
        for memory in (2**40, 1)
    )
    for a, b in zip(whole.terms, parts.terms, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_float16_overflows_for_no_class() -> None:
    model = network().float()
    with torch.no_grad():
        model[2].weight[0] = 0
        model[2].weight[1:] *= 30
    data = [(X[:8].float(), Y[:8])]
    exact = nm.fisher_bounds(model, data)
    result = nm.fisher_bounds(copy.deepcopy(model).half(), [(X[:8].half(), Y[:8])])
    for a, b in zip(result.rows, exact.rows, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=0.1)


def test_equality_at_full_rank_and_for_two_classes() -> None:
    full = nm.fisher_bounds(MODEL, batches(16), rank=2)
    assert full.rows[0].tightness[0] == pytest.approx(1, abs=1e-12)
    assert [(row.actual, row.upper) for row in full.lower_error(2)[:2]] == [(0, 0)] * 2
    two = bounds(CATEGORICAL["two classes"])
    rows = {row.statement: row for row in two.rows}
    for statement in ("Prop. 5, rank 1", "  first, centred", "  second, centred"):
        assert rows[statement].tightness[0] == pytest.approx(1)
    assert two.ranks[0].actual == 0


def test_the_batch_size_does_not_matter_and_batches_may_be_empty() -> None:
    whole = nm.fisher_bounds(MODEL, batches(64), rank=2)
    for data in (batches(1), batches(7), [(X[:0], Y[:0]), *batches(40), (X[:0], Y[:0])]):
        other = nm.fisher_bounds(MODEL, data, rank=2)
        for a, b in zip(whole.rows, other.rows, strict=True):
            assert numbers(a) == pytest.approx(numbers(b), rel=1e-9)
        for a, b in zip(whole.terms, other.terms, strict=True):
            torch.testing.assert_close(a, b)


def test_positions_that_do_not_count_are_left_out() -> None:
    model = nn.Linear(4, 3).double()
    x, y = X[:12].view(4, 3, 4), Y[:12].view(4, 3).clone()
    y[0, 1] = y[2] = -100
    counts = y != -100
    result = nm.fisher_bounds(model, [(x[:3], y[:3]), (x[3:], y[3:])])
    alone = nm.fisher_bounds(model, [(x[counts], y[counts])])
    assert (result.count, result.positions, alone.count) == (3, 8, 8)
    for a, b in zip(result.sum.rows, alone.sum.rows, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-9)
    ignored = Y[:12].clone()
    ignored[3] = -100
    flat = nm.fisher_bounds(model, [(X[:12], ignored)])
    assert flat.positions == flat.count == 11


def test_without_labels_proposition_9_is_left_out() -> None:
    for data in ([X], [(X, torch.rand(64, 3).double())]):
        result = nm.fisher_bounds(MODEL, data)
        statements = [row.statement for row in result.rows]
        assert "Prop. 9" not in statements
        assert "Prop. 10" in statements
        assert "Prop. 9 needs the label" in str(result)


def test_estimates_are_near_the_exact_norms() -> None:
    exact = nm.fisher_bounds(MODEL, batches(16), diagonals=False)
    estimates = [nm.fisher_bounds(MODEL, batches(16), diagonals=False, actual="estimate", seed=s) for s in range(3)]
    assert exact.actual.upper_error is not None
    assert exact.actual.empirical_error is not None
    for one in estimates:
        assert one.actual.upper_error is not None
        assert one.actual.empirical_error is not None
        assert one.actual.upper_error.value == pytest.approx(exact.actual.upper_error.value, rel=0.1)
        assert one.actual.lower_errors[1].value == pytest.approx(exact.actual.lower_errors[1].value, rel=0.1)
        assert one.actual.empirical_error.value == pytest.approx(exact.actual.empirical_error.value, rel=2e-3)
        assert "estimated" in str(one)
        assert "±" in str(one)
    assert len({one.actual.upper_error for one in estimates}) == 3
    passes = {cost.part: cost.passes for cost in estimates[0].costs}["norms of sums"]
    assert passes >= 4 * 2 * (4 + 4 + 8 - 4)  # four batches; a sketch may have fewer directions than columns
    full = nm.fisher_bounds(MODEL, batches(16), rank=2, diagonals=False, actual="estimate")
    assert [row.actual for row in full.lower_error(2)] == [0] * 4
    again = nm.fisher_bounds(MODEL, batches(16), diagonals=False, actual="estimate", seed=0)
    assert again.actual == estimates[0].actual


def test_too_many_samples_are_estimated_and_a_generator_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuromanifold.bounds.kept_gradients._ROWS", 100)
    assert "estimated" in nm.fisher_bounds(MODEL, batches(16), diagonals=False).actual.how
    assert nm.fisher_bounds(MODEL, batches(16), diagonals=False, actual="exact").actual.how.startswith("exact")
    once = nm.fisher_bounds(MODEL, iter(batches(16)), diagonals=False)
    assert once.actual.upper_error is None
    assert "generator" in str(once)
    monkeypatch.setattr("neuromanifold.bounds.kept_gradients._NUMBERS", 10)
    assert "estimated" in nm.fisher_bounds(MODEL, batches(1)[:2], diagonals=False).actual.how
    few = nm.fisher_bounds(MODEL, iter(batches(16)[:1]), diagonals=False, actual="none")
    assert few.actual.upper_error is None


class _Bag(nn.Module):
    """An operation without forward mode, which is not differentiable twice either."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(6, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.bag(ids))


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_norms_that_cannot_be_estimated_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuromanifold.bounds.kept_gradients._ROWS", 1)
    model, data = _Bag(), [(torch.arange(6).view(2, 3), Y[:2])]
    result = nm.fisher_bounds(model, data)
    assert result.actual.upper_error is None
    assert "not computed: `model` must be differentiable in forward mode" in str(result)
    with pytest.raises(ValueError, match="forward mode"):
        nm.fisher_bounds(model, data, actual="estimate")
    with pytest.raises(TypeError, match="`data` must be a list, a DataLoader or .*several times"):
        nm.fisher_bounds(model, iter(data), actual="estimate")


def test_nothing_is_recorded_or_kept_beyond_the_run() -> None:
    result = nm.fisher_bounds(MODEL, batches(16))
    assert not any(term.requires_grad for term in result.terms)
    given_up = KeptGradients(keeps=True, limited=True)
    given_up.give_up()
    assert not given_up.keeps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_precisions(dtype: torch.dtype) -> None:
    exact = nm.fisher_bounds(network(), batches(16), rank=2)
    data = [(x.to(dtype), y) for x, y in batches(16)]
    result = nm.fisher_bounds(network().to(dtype), data, rank=2)
    for a, b in zip(result.rows, exact.rows, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-5 if dtype == torch.float32 else 0.05)


def test_the_model_is_unchanged_after_a_run_and_after_an_error() -> None:
    model = network().train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    nm.fisher_bounds(model, batches(32))
    with pytest.raises(RuntimeError, match="mat1"):
        nm.fisher_bounds(model, [(X, Y), (X[:, :2], Y)])
    with pytest.raises(KeyboardInterrupt):
        nm.fisher_bounds(model, _interrupted())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "0.weight")
    assert not model[0]._forward_hooks
    assert torch.equal(torch.random.get_rng_state(), state)


def _interrupted():  # type: ignore[no-untyped-def]
    yield X, Y
    raise KeyboardInterrupt


def test_a_part_of_the_parameters() -> None:
    part = nm.fisher_bounds(MODEL, batches(32), parameters="2.*").sum
    frozen = copy.deepcopy(MODEL)
    frozen[0].requires_grad_(False)
    J, z = jacobian(frozen, lambda model: model(X))
    expected = reference.statements(J, z, Y, 1)
    for row in part.rows:
        if row.statement.startswith(("Prop", "Cor")):
            assert row.actual == pytest.approx(expected[row.statement].actual, rel=1e-8)
    assert part.diagonals is not None
    assert set(part.diagonals.actual) == {"2.weight", "2.bias"}


def test_files_views_and_the_table(tmp_path: Path) -> None:
    result = nm.fisher_bounds(MODEL, batches(16), rank=2)
    result.save(tmp_path / "bounds.safetensors")
    loaded = nm.load(tmp_path / "bounds.safetensors")
    assert str(loaded) == str(result)
    assert loaded.diagonals is None
    for mean, total in zip(result.rows, result.sum.rows, strict=True):
        assert [64 * value for value in numbers(mean)] == pytest.approx(numbers(total))
    text = str(result)
    for part in ("Prop. 5, rank 2", "Cor. 6, second", "Prop. 10", "Gram matrices 12 passes", "exact, from inner"):
        assert part in text
    assert [row["statement"] for row in result.to_dict()["rows"]] == [row.statement for row in result.rows]  # type: ignore[attr-defined]
    assert isinstance(loaded, nm.NetworkBounds)
    assert loaded.provenance == result.provenance


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning", "ignore::neuromanifold.SuspiciousInputWarning")
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": 3}, ValueError, "`rank` must be between 1 and 2 (1 to C - 1 for the 3 classes"),
        ({"rank": 0}, ValueError, "`rank` must be between 1"),
        ({"rank": 1.5}, TypeError, "`rank` must be an int"),
        ({"likelihood": nm.Bernoulli}, TypeError, "`likelihood` must be nm.Categorical"),
        ({"likelihood": lambda z: nm.Gaussian(z), "data": [X]}, TypeError, "got one of Gaussian"),
        ({"actual": "yes"}, ValueError, "`actual` must be 'auto', 'exact', 'estimate' or 'none'"),
        ({"diagonals": 1}, TypeError, "`diagonals` must be True or False"),
        ({"max_bytes": 0}, ValueError, "`max_bytes` must be between 1"),
        ({"reduction": "max"}, ValueError, "`reduction` must be"),
        ({"parameters": "nothing"}, ValueError, "`parameters` must be"),
        ({"data": X}, TypeError, "`data` must be an iterable of batches"),
        ({"data": []}, ValueError, "at least one sample"),
        ({"data": [(X, Y + 1)]}, ValueError, "Batch 0 of `data`: `labels` must be between 0 and 2"),
        ({"data": [(X, Y[:, None].repeat(1, 2))]}, ValueError, "Batch 0 of `data`: `labels` must be of shape"),
        ({"data": [(X * float("nan"), Y)]}, ValueError, "Batch 0 of `data`: `logits`"),
    ],
)
def test_bad_input_is_named(options: dict[str, object], error: type[Exception], text: str) -> None:
    data = options.pop("data", batches(16))
    with pytest.raises(error) as caught:
        nm.fisher_bounds(MODEL, data, **options)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert message("a", "b", "c").split("`a`")[1][:8] in str(caught.value)
