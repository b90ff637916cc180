"""Exact products F v against the definition, on every kind of network, whatever method finds J v."""

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import linalg as scipy_linalg
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import neuromanifold as nm
from neuromanifold.estimators import Empirical
from neuromanifold.operators.jacobian import METHODS
from neuromanifold.problem.problem import Problem as FisherProblem
from neuromanifold.reference import network as reference
from tests.operators.dense import ALL, SOME, dense, relative_error
from tests.problem.test_unchanged import model as nosy
from tests.problem.test_unchanged import same, snapshot
from tests.problems.problem import Net, Problem
from tests.run.test_contract import MODEL, X, Y, batches, network
from tests.run.test_devices import DEVICES


def operator(problem: Problem, **options: Any) -> nm.FisherOperator:
    return nm.fisher_operator(
        problem.model, problem.data, likelihood=problem.likelihood, reduction="sum", **problem.options, **options
    )


def block(size: int, columns: int = 3) -> Tensor:
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_the_definition(name: str) -> None:
    problem = ALL[name]
    fisher, metric = dense(problem), operator(problem)
    v = block(len(fisher))
    assert metric.shape == fisher.shape
    assert relative_error(metric @ v, fisher @ v) < problem.rtol
    assert relative_error(metric @ v[:, 0], fisher @ v[:, 0]) < problem.rtol
    by_name = reference.by_name(problem.model, v[:, 1])
    found = metric @ by_name
    assert list(found) == list(by_name)
    assert relative_error(torch.cat([found[n].flatten() for n in found]), fisher @ v[:, 1]) < problem.rtol


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("part", [nm.Upper(), nm.Lower(1), nm.Lower(2), nm.Lower(100)], ids=repr)
def test_envelopes(name: str, part: Any) -> None:
    problem = SOME[name]
    rows, logits = reference.jacobian(problem.model, problem.forward)
    core = problem.likelihood(logits)
    if isinstance(part, nm.Upper):
        middle = torch.diag_embed(core.upper_envelope())
    else:
        values, vectors = core.spectrum(min(part.rank, core.rank))
        middle = torch.einsum("nk,nkc,nkd->ncd", values, vectors, vectors)
    expected = torch.einsum("ncp,ncd,ndq->pq", rows, middle, rows)
    v = block(len(expected), 2)
    assert relative_error(operator(problem, envelope=part) @ v, expected @ v) < 1e-9


EXPECTED_METHODS = {
    "MLP": "forward mode",
    "LSTM": "forward mode",
    "DistilBERT": "forward mode, unfused kernels",
    "Llama": "forward mode, unfused kernels",
    "weight norm": "double backward",  # an operation without forward mode
    "under no_grad": "double backward",  # forward mode does not stop there
    "checkpointed": "double backward",
    "Wav2Vec2": "double backward, unfused kernels",
}


@pytest.mark.parametrize("name", EXPECTED_METHODS)
def test_the_first_method_that_works_is_taken(name: str) -> None:
    metric = operator(ALL[name])
    assert metric.method == EXPECTED_METHODS[name]
    assert metric.method in repr(metric)


@pytest.mark.parametrize("name", ["MLP", "CNN with BatchNorm", "LSTM", "tied embeddings", "position ids [1, T]"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same(name: str, method: str) -> None:
    problem = SOME[name]
    metric, v = operator(problem), block(len(dense(problem)))
    metric._jacobian.method = method
    assert relative_error(metric @ v, dense(problem) @ v) < 1e-12


def test_one_by_one_is_the_same_as_a_block() -> None:
    metric, v = operator(SOME["CNN with BatchNorm"]), block(79, 11)
    together = metric @ v
    assert metric._jacobian.vectorized
    metric._jacobian.vectorized = False
    torch.testing.assert_close(metric @ v, together, rtol=1e-12, atol=1e-14)


class WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


class WithoutSecondDerivatives(WithoutForwardMode):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


def of_function(function: Any) -> nn.Module:
    layers = {"a": nn.Linear(4, 5), "b": nn.Linear(5, 3)}
    return Net(lambda m, x: m.b(function.apply(m.a(x))), **layers).double()


def test_functions_of_the_users_own() -> None:
    model = of_function(WithoutForwardMode)
    metric = nm.fisher_operator(model, batches(20), reduction="sum")
    assert metric.method == "double backward"
    expected = reference.reference_matrix(model, lambda m: m(X))
    assert relative_error(metric @ block(43), expected @ block(43)) < 1e-12
    with pytest.raises(
        ValueError, match=r"`model` must be differentiable in forward mode, or twice.*nm.fisher_factors"
    ):
        nm.fisher_operator(of_function(WithoutSecondDerivatives), batches(20))


@pytest.mark.parametrize("functional_call", [False, True])
def test_padding_rows_have_no_gradient_in_either_mode(functional_call: bool) -> None:
    ids = torch.tensor([[0, 1, 2], [3, 0, 0], [4, 4, 1]])

    def run(m: Net, x: Tensor) -> Tensor:
        rows = functional.embedding(x, m.table.weight, padding_idx=0) if functional_call else m.table(x)
        return m.head(torch.tanh(rows).sum(1))

    model = Net(run, table=nn.Embedding(5, 2, padding_idx=0), head=nn.Linear(2, 3)).double()
    nn.init.normal_(model.table.weight, generator=torch.Generator().manual_seed(0))
    metric = nm.fisher_operator(model, [ids], reduction="sum")
    assert metric.method == ("double backward" if functional_call else "forward mode")
    expected = reference.reference_matrix(model, lambda m: m(ids))
    assert expected[:2].abs().max() == 0
    assert relative_error(metric @ block(19), expected @ block(19)) < 1e-12


def test_a_use_of_a_parameter_that_replacing_it_misses_is_noticed() -> None:
    model = Net(lambda m, x: m.head(functional.linear(torch.tanh(m.layer(x)), m.kept[0])), layer=nn.Linear(4, 4))
    model.head, model.kept = nn.Linear(4, 3), [model.layer.weight]  # a plain list
    model = model.double()
    metric = nm.fisher_operator(model, batches(20), reduction="sum")
    assert metric.method == "double backward"
    expected = reference.reference_matrix(network_like(model), lambda m: m(X))
    assert relative_error(metric @ block(35), expected @ block(35)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_noticed_in_half_precision_too(dtype: torch.dtype) -> None:
    """A single random comparison would be within rounding by chance for 16 of 40 such models."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = Net(lambda m, x: m.head(functional.linear(torch.tanh(m.layer(x)), m.kept[0])), layer=nn.Linear(4, 4))
        model.head = nn.Linear(4, 3)
        model.to(dtype).kept = [model.layer.weight]
        assert nm.fisher_operator(model, [X[:12].to(dtype)]).method == "double backward"


def test_what_only_later_batches_do_is_noticed() -> None:
    """Padding, where forward mode and backward mode differ, and not in the first batch."""
    ids = [torch.tensor([[1, 2, 3], [3, 4, 4]]), torch.tensor([[0, 1, 2], [3, 0, 0]])]
    parts = {"table": nn.Embedding(5, 2), "head": nn.Linear(2, 3)}
    model = Net(
        lambda m, x: m.head(torch.tanh(functional.embedding(x, m.table.weight, padding_idx=0)).sum(1)), **parts
    ).double()
    nn.init.normal_(model.table.weight, generator=torch.Generator().manual_seed(0))
    for v in (block(19), block(19)[:, 0]):
        with pytest.raises(ValueError, match=r"the same derivatives in both modes.*in some batch.*Put a batch that"):
            nm.fisher_operator(model, ids) @ v
    expected = reference.reference_matrix(model, lambda m: torch.cat([m(one) for one in ids]))
    found = nm.fisher_operator(model, ids[::-1], reduction="sum") @ block(19)
    assert relative_error(found, expected @ block(19)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_directions_that_change_nothing_are_no_error(dtype: torch.dtype) -> None:
    """Where both sides of the comparison are rounding: a scale before LayerNorm, a constant added to all logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16, bias=False), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    metric = nm.fisher_operator(model, [X[:32].to(dtype)] * 3)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, direction in (("0.weight", model[0].weight.detach()), ("3.bias", torch.ones(3))):
        assert metric.length({**zeros, name: direction}) < 300 * torch.finfo(dtype).eps
    assert not (metric @ torch.zeros(metric.shape[0], 2)).any()


def test_autocast_may_be_switched_on_later() -> None:
    model, v = network().float(), block(67).float()
    metric = nm.fisher_operator(model, [X.float()])
    expected = (metric @ v).double()
    with torch.autocast("cpu", dtype=torch.float16):
        assert relative_error(1e6 * (metric @ (1e-6 * v)), expected) < 0.01
        lower = nm.fisher_operator(model, [X.float()], envelope=nm.Lower(1)) @ v
    assert relative_error(lower, (nm.fisher_operator(model, [X.float()], envelope=nm.Lower(1)) @ v).double()) < 0.01


@pytest.mark.parametrize("columns", [1, 3])
def test_logits_in_float16_of_a_model_in_float32(columns: int) -> None:
    layer, v = nn.Linear(4, 3), block(15, columns).float()
    metric = nm.fisher_operator(Net(lambda m, x: m.layer(x).half(), layer=layer), [X.float()])
    expected = (nm.fisher_operator(layer, [X.float()]) @ v).double()
    for scale in (1.0, 1e-9):
        assert relative_error(metric @ (scale * v) / scale, expected) < 0.01


def network_like(model: Net) -> Net:
    """The same with a second use that copies of it keep."""
    same_function = Net(
        lambda m, x: m.head(functional.linear(torch.tanh(m.layer(x)), m.layer.weight)), layer=model.layer
    )
    same_function.head = model.head
    return same_function


def test_ignored_and_masked_positions_do_not_count() -> None:
    model = Net(lambda m, x, attention_mask: m.layer(torch.tanh(x)), layer=nn.Linear(2, 3)).double()  # noqa: ARG005
    x = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    labels = torch.tensor([[0, -100, 1, 2], [1, 2, 0, -100], [0, 0, 0, 0]])
    metric = nm.fisher_operator(model, [{"x": x, "attention_mask": mask, "labels": labels}], reduction="sum")
    kept = x[mask.bool() & (labels != -100)]
    expected = reference.reference_matrix(model, lambda m: m(kept, None))
    assert relative_error(metric @ block(9), expected @ block(9)) < 1e-12
    assert metric.count == 2
    flat = nm.fisher_operator(MODEL, [(X[:4], torch.tensor([0, -100, 1, -100]))], reduction="sum")
    assert flat.count == 2
    expected = reference.reference_matrix(MODEL, lambda m: m(X[:4][[0, 2]]))
    assert relative_error(flat @ block(67), expected @ block(67)) < 1e-12


def test_batches_of_any_size_and_none() -> None:
    expected = reference.reference_matrix(MODEL, lambda m: m(X)) @ block(67)
    for size in (1, 7, 64):
        assert relative_error(nm.fisher_operator(MODEL, batches(size)).sum @ block(67), expected) < 1e-12
    empty = (X[:0], Y[:0])
    metric = nm.fisher_operator(MODEL, [empty, *batches(40), empty])
    assert metric.count == 64
    assert relative_error(64 * (metric @ block(67)), expected) < 1e-12
    assert metric.sum.mean.reduction == "mean"


def test_parameters_without_a_dimension_and_without_entries() -> None:
    parts = {
        "scale": nn.Parameter(torch.tensor(2.0)),
        "nothing": nn.Parameter(torch.zeros(0, 3)),
        "layer": nn.Linear(4, 3),
    }
    model = Net(lambda m, x: m.layer(torch.tanh(m.scale * x)), **parts).double()
    expected = reference.reference_matrix(model, lambda m: m(X))
    metric = nm.fisher_operator(model, batches(20), reduction="sum")
    assert relative_error(metric @ block(16), expected @ block(16)) < 1e-12
    assert relative_error(metric @ block(16)[:, 0], expected @ block(16)[:, 0]) < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        assert relative_error(nm.fisher_matrix(model, batches(20)).sum.dense(), expected) < 1e-12


def test_the_model_is_looked_at_anew_with_each_product() -> None:
    model = network()
    metric = nm.fisher_operator(model, batches(64), reduction="sum")
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert relative_error(metric @ block(67), reference.reference_matrix(model, lambda m: m(X)) @ block(67)) < 1e-12


def test_a_selection_of_parameters() -> None:
    metric = nm.fisher_operator(MODEL, batches(64), parameters="2.*", reduction="sum")
    expected = reference.reference_matrix(MODEL, lambda m: m(X))[40:, 40:]
    assert list(metric.layout.shapes) == ["2.weight", "2.bias"]
    assert relative_error(metric @ block(27), expected @ block(27)) < 1e-12


def test_a_middle_of_ones_own_sees_the_labels() -> None:
    """The empirical Fisher information as an operator."""

    def outer(core: nm.Core, labels: Tensor | None, v: Tensor) -> Tensor:
        assert labels is not None
        score = core.score(labels)
        return score * (score * v).sum(-1, keepdim=True)

    metric = nm.FisherOperator(FisherProblem.of(MODEL, batches(20)), outer, Empirical(), "sum")
    rows, logits = reference.jacobian(MODEL, lambda m: m(X))
    gradients = torch.einsum("ncp,nc->np", rows, nm.Categorical(logits).score(Y))
    assert relative_error(metric @ block(67), gradients.T @ gradients @ block(67)) < 1e-12
    with pytest.raises(ValueError, match="`labels` must be given"):
        nm.FisherOperator(FisherProblem.of(MODEL, [X]), outer, Empirical())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """Sums and vectors are float32; the error is that of the passes in half precision, at any scale of v."""
    model, x = network().to(dtype).float(), X.to(dtype).float()
    expected = reference.reference_matrix(model, lambda m: m(x.double())) @ block(67)
    half = model if autocast else copy.deepcopy(model).to(dtype)
    data = [x if autocast else x.to(dtype)]
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        metric = nm.fisher_operator(half, data, reduction="sum")
        assert metric.precision == torch.float32
        for scale in (1e-6, 1.0, 1e4, 1e-15):
            found = metric @ (scale * block(67))
            assert found.dtype == torch.float32
            assert relative_error(found / scale, expected) < (0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize("name", ["MLP", "transformer encoder", "GPT-2 (tokens, tied)", "segmentation, class_dim=1"])
def test_it_measures_the_divergence_of_small_steps(name: str) -> None:
    problem = ALL[name]
    metric = operator(problem)
    step = {n: 1e-4 * v for n, v in reference.by_name(problem.model, block(metric.shape[0])[:, 0]).items()}
    ratio = math.sqrt(2 * reference.divergence(problem.model, problem.forward, step)) / metric.length(step)
    assert ratio == pytest.approx(1, abs=2e-3)


def test_scipy_takes_it_as_it_is() -> None:
    problem = ALL["CNN with BatchNorm"]
    metric, fisher = operator(problem), dense(problem)
    values, vectors = scipy_linalg.eigsh(metric, k=3)
    np.testing.assert_allclose(values, torch.linalg.eigvalsh(fisher)[-3:].numpy(), rtol=1e-8)
    assert vectors.shape == (79, 3)
    damped = scipy_linalg.aslinearoperator(metric) + 0.1 * scipy_linalg.aslinearoperator(np.eye(79))
    rhs = block(79)[:, 0].numpy()
    x, failed = scipy_linalg.cg(damped, rhs, rtol=1e-10)
    assert not failed
    np.testing.assert_allclose(
        x, torch.linalg.solve(fisher + 0.1 * torch.eye(79, dtype=torch.float64), torch.from_numpy(rhs)), rtol=1e-6
    )
    assert metric.scipy().matmat(block(79).numpy()).shape == (79, 3)


def test_data_that_can_be_gone_through_once_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`data` must be a list.*got an iterator.*list\(data\)"):
        nm.fisher_operator(MODEL, (batch for batch in batches(8)))
    with pytest.raises(TypeError, match=r"`data` must be a list.*got an iterator.*list\(data\)"):
        nm.fisher_operator(MODEL, Once())
    with pytest.raises(ValueError, match="at least one sample"):
        nm.fisher_operator(MODEL, [])
    with pytest.raises(ValueError, match="at least one sample"):
        nm.fisher_operator(MODEL, [X[:0]])


class Once:
    """Not an iterator, but always the same one inside."""

    def __init__(self) -> None:
        self.batches = iter(batches(32))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class Shrinking:
    """Yields less each time."""

    def __init__(self) -> None:
        self.left = 4

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        self.left -= 1
        return iter(X.split(16)[: self.left])


def test_data_that_change_are_noticed() -> None:
    metric = nm.fisher_operator(MODEL, Shrinking())
    metric @ block(67)
    with pytest.raises(ValueError, match=r"the same batches in each pass, got 1 batches after 2.*shuffle=False"):
        metric @ block(67)


def test_loaders_may_shuffle() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True)
    metric = nm.fisher_operator(MODEL, loader)
    torch.testing.assert_close(metric @ block(67), metric @ block(67))


def test_bad_input() -> None:
    metric = nm.fisher_operator(MODEL, batches(64))
    for wrong in (block(66), block(67)[None], torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"`v` must be a tensor or array of shape \[67\] or \[67, m\]"):
            metric @ wrong
    with pytest.raises(TypeError, match="`v` must be a tensor or array"):
        metric @ [1.0] * 67
    with pytest.raises(TypeError, match="`v` must be real"):
        metric @ block(67).to(torch.complex128)
    step = {name: torch.ones_like(p) for name, p in MODEL.named_parameters()}
    with pytest.raises(ValueError, match=r"without '0.bias'"):
        metric @ {name: value for name, value in step.items() if name != "0.bias"}
    with pytest.raises(ValueError, match=r"one with 'other' too"):
        metric @ {**step, "other": step["0.bias"]}
    with pytest.raises(ValueError, match=r"`v\['0.bias'\]` must be a tensor of shape \[8\], got shape \[2\]"):
        metric @ {**step, "0.bias": torch.ones(2)}
    with pytest.raises(TypeError, match=r"`envelope` must be None"):
        nm.fisher_operator(MODEL, batches(64), envelope=nm.Upper)
    with pytest.raises(ValueError, match="`reduction` must be"):
        nm.fisher_operator(MODEL, batches(64), reduction="max")
    with pytest.raises(TypeError, match="`likelihood` must be"):
        nm.fisher_operator(MODEL, batches(64), likelihood="categorical")
    with pytest.raises(ValueError, match=r"Batch 1 of `data`: `logits` must be free of NaN"):
        nm.fisher_operator(MODEL, [X[:2], torch.full((2, 4), math.nan, dtype=torch.float64)]) @ block(67)
    with pytest.raises(ValueError, match=r"Batch 0 of `data`: `logits` must be free of NaN"):
        nm.fisher_operator(MODEL, [torch.full((2, 4), math.nan, dtype=torch.float64)])
    assert (metric @ block(67, 0)).shape == (67, 0)
    for wrong_value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="`v` must be finite"):
            nm.fisher_operator(nn.Linear(4, 3).half(), [X.half()]) @ torch.full((15,), wrong_value)
    ignored = (torch.full((2, 4), math.nan, dtype=torch.float64), torch.tensor([-100, -100]))
    with pytest.raises(ValueError, match="derivatives that are NaN"):
        nm.fisher_operator(MODEL, [ignored])


@pytest.mark.parametrize("fails_at", [10**9, 0, 1, 2, 3])
def test_nothing_changes(fails_at: int) -> None:
    m = nosy()
    before = snapshot(m)
    m.fail_at = m.calls + fails_at
    data = [torch.ones(4, 4)] * 4  # its calls are counted once for each
    if fails_at < 10:
        with pytest.raises(KeyboardInterrupt):
            nm.fisher_operator(m, data) @ torch.ones(63, 2)
    else:
        metric = nm.fisher_operator(m, data)
        metric @ torch.ones(metric.shape[0], 2)
    after = snapshot(m)
    for key in before:
        assert same(before[key], after[key]), key


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SOME)
def test_on_every_device(name: str, device: str) -> None:
    problem = copy.copy(SOME[name])
    fisher, problem.model = dense(problem), copy.deepcopy(problem.model).to(device)
    v = block(len(fisher))
    found = operator(problem) @ v
    assert found.device.type == device
    assert relative_error(found.cpu(), fisher @ v) < 1e-9
    options = {"likelihood": problem.likelihood, "reduction": "sum", **problem.options}
    stack = nm.fisher_factors(problem.model, problem.data, nm.Exact(), "sample", dtype=torch.float64, **options)
    assert relative_error((stack @ v).cpu(), fisher @ v) < 1e-9
    assert relative_error((nm.fisher_matrix(problem.model, problem.data, **options) @ v).cpu(), fisher @ v) < 1e-9


def test_progress_is_shown_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    nm.fisher_operator(MODEL, batches(64)) @ block(67)
    assert not capsys.readouterr().err
    nm.fisher_operator(MODEL, batches(64), progress=True) @ block(67)
    assert "Fisher information" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_compiled_models() -> None:
    model = torch.compile(network(), backend="eager")
    model(X)
    metric = nm.fisher_operator(model, batches(64), reduction="sum")
    assert relative_error(metric @ block(67), reference.reference_matrix(MODEL, lambda m: m(X)) @ block(67)) < 1e-12


class Counting(nn.Module):
    """Scales its logits by the number of its calls, or by one that it is given."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layer, self.counts, self.calls = nn.Linear(4, 3), counts, 0

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x) * (self.calls if self.counts else number[0])
        return out


def test_a_state_of_the_model_advances_once_for_each_batch() -> None:
    """A block of vectors takes several forward passes of a batch."""
    counting, told = Counting(counts=True), Counting(counts=False)
    told.load_state_dict(counting.state_dict())
    data = [((x, torch.full((len(x),), i + 1)),) for i, x in enumerate(torch.randn(9, 4).split(3))]
    vectors = torch.randn(15, 11)
    expected = nm.fisher_operator(told, data) @ vectors
    metric = nm.fisher_operator(counting, data)
    for _ in range(2):
        torch.testing.assert_close(metric @ vectors, expected)
    assert counting.calls == 0
