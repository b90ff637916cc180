"""What the data may look like, which parameters count, precision, and what goes wrong."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import neuromanifold as nm
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import read_outputs
from tests.problems.networks import PROBLEMS
from tests.run.test_contract import MODEL, X, Y, batches, network
from tests.zscores import assert_right_trace

EXPECTED = nm.fisher_diagonal(MODEL, [X], seed=1)


class Wrapped(nn.Module):
    """The same network behind another kind of output."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = network(), wrap

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:  # noqa: ARG002
        return self.wrap(self.net(x))


Output = namedtuple("Output", ["logits", "other"])


@pytest.mark.parametrize(
    "item",
    [X, (X,), [X], (X, Y), [X, Y], {"input": X}, {"input": X, "labels": Y}, ({"input": X}, Y)],
    ids=lambda i: type(i),
)
def test_every_form_of_batch(item: Any) -> None:
    result = nm.fisher_diagonal(MODEL, [item], seed=1)
    assert torch.equal(result["0.weight"], EXPECTED["0.weight"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda z: z,
        lambda z: (z, "more"),
        lambda z: [z],
        lambda z: {"logits": z},
        lambda z: OrderedDict(loss=None, logits=z),
        lambda z: Output(z, 1),
    ],
)
def test_every_form_of_output(wrap: Callable[[Tensor], Any]) -> None:
    result = nm.fisher_diagonal(Wrapped(wrap), [X], seed=1)
    assert torch.equal(result["net.0.weight"], EXPECTED["0.weight"])


def test_ignored_and_masked_positions_do_not_count() -> None:
    """Positions that do not count might as well not be there."""
    tokens = X.view(16, 4, 4)
    valid = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    valid[:, 0] = True
    labels = torch.where(valid, Y.view(16, 4), -100)
    masked = {"x": tokens, "attention_mask": valid.long()}
    whole = {"reduction": "sum", "granularity": "batch"}
    for estimator, options in ((nm.Hutchinson(20, deflate=0), whole), (nm.Exact(), {"reduction": "sum"})):
        flat = nm.fisher_diagonal(MODEL, [tokens[valid]], estimator, **options)
        by_label = nm.fisher_diagonal(MODEL, [(tokens, labels)], estimator, **options)
        by_mask = nm.fisher_diagonal(Wrapped(lambda z: z), [masked], estimator, **options)
        for result, prefix in ((by_label, ""), (by_mask, "net.")):
            assert (result.count, result.positions) == (16, int(valid.sum()))
            torch.testing.assert_close(result[f"{prefix}0.weight"], flat["0.weight"], rtol=1e-12, atol=0)
    random = nm.fisher_diagonal(
        MODEL, [(tokens, labels)], nm.Hutchinson(400, deflate=0, orthogonal=False), reduction="sum"
    )
    for name in random:  # positions of a sample are added before they are squared: another noise, the same mean
        assert ((random[name] - flat[name]).abs() <= 7 * random.stderr[name]).all()
    assert_right_trace(random, flat)
    other = nm.fisher_diagonal(MODEL, [(tokens, torch.where(valid, Y.view(16, 4), 7))], ignore_index=7)
    assert other.positions == int(valid.sum())


def test_ignored_labels_are_respected_by_every_way_to_say_categorical() -> None:
    """Nor does the mean count samples that do not count."""
    labels = torch.where(torch.arange(64) < 40, Y, -100)
    expected = nm.fisher_diagonal(MODEL, [X[:40]], nm.Hutchinson(300, deflate=0))
    for likelihood in (nm.Categorical, lambda z: nm.Categorical(z), partial(nm.Categorical, validate=False)):
        result = nm.fisher_diagonal(MODEL, [(X, labels)], nm.Hutchinson(300, deflate=0), likelihood)
        assert (result.count, result.positions) == (40, 40)
        assert result.compare(expected).relmae < 0.2
    assert nm.fisher_diagonal(MODEL, [(X, labels.to(torch.uint8))], ignore_index=156).count == 40


def test_a_decoder_has_a_mask_of_its_own() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, **_: Tensor) -> Tensor:  # noqa: ARG002
            return self.net(x)

    ids, mask = torch.zeros(16, 4), torch.zeros(16, 4)
    batch = {"x": X.view(16, 4, 4), "attention_mask": mask, "decoder_input_ids": ids}
    assert nm.fisher_diagonal(Decoder(), [batch]).positions == 64
    mask = torch.ones(16, 4)
    mask[:, 2:] = 0
    assert nm.fisher_diagonal(Decoder(), [{**batch, "decoder_attention_mask": mask}]).positions == 32


def test_sparse_gradients_and_data_without_length() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.arange(12) % 5)

    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    dense = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    dense.load_state_dict(sparse.state_dict())
    loader = DataLoader(Stream(), batch_size=4)
    results = [nm.fisher_diagonal(model, loader, progress=True) for model in (sparse, dense)]
    assert torch.equal(results[0]["0.weight"], results[1]["0.weight"])


def test_batches_of_none_and_one() -> None:
    result = nm.fisher_diagonal(MODEL, [X[:0], X[:1], X[1:]], seed=1)
    assert (result.count, result.provenance.batches) == (64, 3)
    assert torch.isfinite(result["0.weight"]).all()


def test_samples_without_positions_do_not_count() -> None:
    """A batch of empty sequences changes nothing, though all of their labels count."""
    tokens, labels = X.view(16, 4, 4), Y.view(16, 4)
    expected = nm.fisher_diagonal(MODEL, [(tokens, labels)], seed=1)
    result = nm.fisher_diagonal(MODEL, [(tokens, labels), (tokens[:, :0], labels[:, :0])], seed=1)
    assert (result.count, result.positions) == (16, 64)
    assert torch.equal(result["0.weight"], expected["0.weight"])


def test_parameters_by_pattern_list_and_predicate() -> None:
    for selection, names in [
        ((pattern for pattern in ["0.*", "2.bias"]), ["0.weight", "0.bias", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["*.bias", "0.weight"], ["0.weight", "0.bias", "2.bias"]),
        (lambda _, parameter: parameter.ndim == 2, ["0.weight", "2.weight"]),
    ]:
        result = nm.fisher_diagonal(MODEL, [X], parameters=selection, seed=1)
        assert list(result) == names
        for name in names:
            assert torch.equal(result[name], EXPECTED[name])
    frozen = PROBLEMS["frozen and unused"]
    result = nm.fisher_diagonal(frozen.model, frozen.data)
    assert not any(name.startswith("frozen") for name in result)
    assert (result["unused.weight"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_accumulate_in_float32(dtype: torch.dtype) -> None:
    half = network().to(dtype)
    reference = nm.fisher_diagonal(network().to(dtype).float(), [X.to(dtype).float()], nm.Hutchinson(64, deflate=0))
    result = nm.fisher_diagonal(half, [X.to(dtype)], nm.Hutchinson(64, deflate=0))
    assert result["0.weight"].dtype == torch.float32
    assert result.compare(reference).relmae_positive < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_float16_gradients_do_not_underflow() -> None:
    """Gradients of 1e-9 are zero in float16; the cotangent is scaled up before the backward pass, not after."""
    small = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with torch.no_grad():
        small[0].weight.fill_(1e-4)
        small[1].weight.copy_(1e-4 * torch.arange(24).view(3, 8))
    x = 1e-3 * X.half()
    reference = nm.fisher_diagonal(small.half().float(), [x.float()], nm.Hutchinson(64, deflate=0))
    result = nm.fisher_diagonal(small.half(), [x], nm.Hutchinson(64, deflate=0))
    assert (reference["0.weight"] > 0).all()
    assert 0 < float(reference["0.weight"].max()) < 1e-12
    assert result.compare(reference).relmae_positive < 0.05


def test_float16_gradients_do_not_overflow() -> None:
    torch.manual_seed(0)
    large = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).half()
    with torch.no_grad():
        large[1].weight.mul_(1000)
    x = 30 * X.half()
    result = nm.fisher_diagonal(large, [x], nm.Hutchinson(envelope=nm.Upper()))
    assert all(torch.isfinite(value).all() for value in result.values())
    assert any((value > 0).any() for value in result.values())


def test_float16_inside_a_float32_model_does_not_underflow() -> None:
    """Logits and parameters are float32; only what autocast does between them is float16."""
    model = Wrapped(lambda z: z.float())
    with torch.no_grad():
        model.net[2].bias[0] = 28  # a confident model: cotangents of 1e-6
    model.float()
    reference = nm.fisher_diagonal(model, [X.float()], nm.Hutchinson(32, deflate=0))
    with torch.autocast("cpu", dtype=torch.float16):
        result = nm.fisher_diagonal(model, [X.float()], nm.Hutchinson(32, deflate=0))
    assert result.filter("*0.weight").compare(reference.filter("*0.weight")).relmae_positive < 0.1


def test_autocast() -> None:
    model = network().float()
    reference = nm.fisher_diagonal(model, [X.float()], nm.Hutchinson(64, deflate=0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = nm.fisher_diagonal(model, [X.float()], nm.Hutchinson(64, deflate=0))
    assert result["0.weight"].dtype == torch.float32
    assert result.compare(reference).relmae_positive < 0.1


def test_ambient_no_grad_and_inference_mode() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = nm.fisher_diagonal(MODEL, [X], seed=1)
        assert torch.equal(result["0.weight"], EXPECTED["0.weight"])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


def fisher(**changes: Any) -> Callable[[], nm.DiagonalFisher]:
    return lambda: nm.fisher_diagonal(**{"model": MODEL, "data": batches(32), **changes})


NAN_AT_1 = [X[:8], torch.full((8, 4), float("nan"), dtype=torch.float64)]
BAD = {
    "nan names the batch": (fisher(data=NAN_AT_1), ValueError, r"Batch 1 of `data`: `logits`.*NaN at index \[0\]"),
    "no data": (fisher(data=[]), ValueError, "`data`.*at least one sample.*generator"),
    "no samples": (fisher(data=[X[:0]]), ValueError, "`data`.*at least one sample"),
    "strange batch": (fisher(data=["text"]), TypeError, "Batch 0 of `data`.*tuple.*got str"),
    "one tensor": (fisher(data=X), TypeError, r"`data`.*a single batch.*\[batch\]"),
    "one pair": (fisher(data=(X, Y)), TypeError, "`data`.*a single batch"),
    "one dict": (fisher(data={"input": X}), TypeError, "`data`.*a single batch"),
    "a data set": (fisher(data=TensorDataset(X, Y)), TypeError, "`data`.*DataLoader"),
    "a number": (fisher(data=3), TypeError, "`data`.*iterable.*int"),
    "loss first": (fisher(model=Wrapped(lambda z: (z.sum(), z))), ValueError, r"`logits`.*shape \[\].*loss"),
    "lazy": (fisher(model=nn.LazyLinear(3)), ValueError, "`model`.*initialised.*lazy"),
    "complex": (fisher(model=Complex()), TypeError, "`parameters`.*real.*complex64"),
    "not a core": (fisher(likelihood=lambda z: z.softmax(-1)), TypeError, "`likelihood`.*Tensor"),
    "rtol without noise": (fisher(estimator=nm.Exact(), rtol=0.1), ValueError, "`rtol`.*None for Exact"),
    "all ignored": (fisher(data=[(X, Y * 0 - 100)]), ValueError, "`data`.*Ignored"),
    "part without parentheses": (lambda: nm.Hutchinson(envelope=nm.Upper), TypeError, "`envelope`.*parentheses"),
    "part by name": (lambda: nm.Exact(envelope="full"), TypeError, "`envelope`.*nm.Upper"),
    "three in a tuple": (fisher(data=[(X, Y, Y)]), TypeError, "Batch 0 of `data`.*tuple of length 3"),
    "labels in a list": (fisher(data=[(X, Y.tolist())]), TypeError, "`labels`.*a tensor.*list"),
    "no match": (fisher(parameters="encoder.*"), ValueError, "`parameters`.*'encoder.*'.*0.weight"),
    "not a module": (fisher(model=torch.sigmoid), TypeError, "`model`.*Module"),
    "no parameters": (fisher(model=nn.ReLU()), ValueError, "`model`.*parameters"),
    "no graph": (fisher(model=Detached()), ValueError, "`model`.*differentiable.*detach"),
    "all frozen": (fisher(model=network().requires_grad_(False)), ValueError, "`parameters`.*frozen.*requires_grad_"),
    "no labels": (fisher(data=[X], estimator=nm.Empirical()), ValueError, "Batch 0.*`labels`.*Empirical"),
    "label too large": (fisher(data=[(X, Y + 9)], estimator=nm.Empirical()), ValueError, "Batch 0.*between 0 and 2"),
    "label shape": (
        fisher(data=[(X, Y[:5])], estimator=nm.Empirical()),
        ValueError,
        r"Batch 0.*`labels`.*\[64\].*\[5\]",
    ),
    "target shape": (
        fisher(data=[(X[:3], X[:3, 0])], estimator=nm.Empirical(), likelihood=nm.Gaussian),
        ValueError,
        r"`labels`.*\[3, 3\]|`y`",
    ),
    "estimator class": (fisher(estimator=nm.Hutchinson), TypeError, "`estimator`.*nm.Hutchinson"),
    "estimator name": (fisher(estimator="hutchinson"), TypeError, "`estimator`"),
    "granularity": (fisher(granularity="token"), ValueError, "`granularity`.*'auto'.*'token'"),
    "exact by batch": (fisher(estimator=nm.Exact(), granularity="batch"), ValueError, "not a Fisher.*SquaredBatch"),
    "reduction": (fisher(reduction="none"), ValueError, "`reduction`.*'mean'.*'none'"),
    "rtol": (fisher(rtol=-1), ValueError, "`rtol`.*a number > 0"),
    "seed": (fisher(seed=-1), ValueError, "`seed`"),
    "seed float": (fisher(seed=0.5), TypeError, "`seed`.*an int"),
    "class_dim": (fisher(class_dim=2), ValueError, r"`class_dim`.*\[32, 3\]"),
    "likelihood": (fisher(likelihood="gaussian"), TypeError, "`likelihood`.*nm.Categorical"),
    "output": (fisher(model=Wrapped(lambda z: {"loss": z})), TypeError, "`model's output`.*logits.*dict"),
    "unknown argument": (fisher(batch_size=3), TypeError, "batch_size"),
    "probes": (lambda: nm.Hutchinson(probes=0), ValueError, "`probes`"),
    "noise": (lambda: nm.Hutchinson(noise="uniform"), ValueError, "`noise`.*'rademacher'.*'uniform'"),
    "deflate an envelope": (lambda: nm.Hutchinson(deflate=1, envelope=nm.Upper()), ValueError, "`deflate`.*envelope"),
    "rank": (lambda: nm.Lower(0), ValueError, "`rank`"),
    "samples": (lambda: nm.MonteCarlo(1.5), TypeError, "`samples`.*an int"),
}


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_clear_error(name: str) -> None:
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call()


def test_slow_paths_are_announced() -> None:
    model = nn.Bilinear(4, 4, 3).double()
    with pytest.warns(nm.SlowPathWarning, match=r"weight.*exact but slow.*random probes"):
        nm.fisher_diagonal(model, [{"input1": X[:2], "input2": X[:2]}], nm.Exact())


@pytest.mark.parametrize(
    ("batch_dim", "text"),
    [("x", "batch_dim"), (-1, "batch_dim"), (True, "batch_dim"), (7, "a dimension of the logits"), (2, "classes")],
)
def test_a_batch_dim_that_cannot_be_is_refused(batch_dim: object, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        nm.fisher_diagonal(nn.Linear(3, 2), [torch.randn(4, 5, 3)], batch_dim=batch_dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)], ids=["samples", "tokens"])
def test_masks_in_which_all_count_are_left_out(shape):
    """And the noise is the same with and without them."""
    x, model = torch.randn(*shape, generator=torch.Generator().manual_seed(0)), nn.Linear(4, 3)
    labels = torch.ones(shape[:-1], dtype=torch.int64)
    outputs = read_outputs(model(x), Batch((x,), {}, labels), -1, -100)
    assert outputs.valid is None
    assert outputs.samples == 5
    assert outputs.positions == labels.numel()
    some = labels.clone()
    some.view(-1)[0] = -100
    outputs = read_outputs(model(x), Batch((x,), {}, some), -1, -100)
    assert outputs.valid is not None
    assert int(outputs.valid.sum()) == labels.numel() - 1
    alone, labelled = (nm.fisher_diagonal(model, [item]) for item in (x, (x, labels)))
    assert torch.equal(alone.sums["weight"], labelled.sums["weight"])
