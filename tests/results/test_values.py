"""Results as values: names, scales, sums that are refused, and one kind of trace."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import neuromanifold as nm
from neuromanifold.problem.model import plain_name
from tests.run.test_contract import MODEL, X, batches, network

RESULT = nm.fisher_diagonal(MODEL, batches(16), seed=1)
RESULTS = {
    "diagonal": lambda seed=1, data=None, model=MODEL: nm.fisher_diagonal(model, data or batches(16), seed=seed),
    "trace": lambda seed=1, data=None, model=MODEL: nm.fisher_trace(model, data or batches(16), seed=seed),
    "factors": lambda seed=1, data=None, model=MODEL: nm.fisher_factors(model, data or batches(16), seed=seed),
    "matrix": lambda seed=1, data=None, model=MODEL: nm.fisher_matrix(model, data or batches(16), seed=seed),
}
every_kind = pytest.mark.parametrize("kind", RESULTS)


def value(result: object) -> torch.Tensor:
    if isinstance(result, nm.DiagonalFisher):
        return result["0.weight"]
    if isinstance(result, nm.TraceEstimate):
        return torch.tensor(result.value, dtype=torch.float64)
    return result @ torch.ones(67)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------------ scale


@every_kind
def test_scaling_multiplies_values_and_errors_and_leaves_the_count(kind: str) -> None:
    result = RESULTS[kind]()
    half = 0.5 * result
    for same in (result * 0.5, result / 2, np.float64(0.5) * result, result * np.float32(0.5)):
        assert type(same) is type(result)
        torch.testing.assert_close(value(same), value(half))
    torch.testing.assert_close(value(half), 0.5 * value(result))
    assert (half.count, half.provenance.scale) == (64, 0.5)
    assert (half / 2).provenance.scale == 0.25
    trace = half if kind == "trace" else half.trace
    before = result if kind == "trace" else result.trace
    assert trace.stderr == pytest.approx(before.stderr / 2)
    assert trace.value == pytest.approx(before.value / 2)


def test_views_of_a_scaled_result_agree_and_print_the_scale() -> None:
    half = RESULT / 2
    torch.testing.assert_close(half.sum["0.bias"], 32 * RESULT["0.bias"])
    torch.testing.assert_close(half.sum.mean["0.bias"], half["0.bias"])
    torch.testing.assert_close(half.stderr["0.bias"], RESULT.stderr["0.bias"] / 2)
    assert half.relative_error == pytest.approx(RESULT.relative_error)
    assert "multiplied by 0.5" in str(half)


@pytest.mark.parametrize("factor", [0, -1.0, math.inf, math.nan])
def test_only_positive_numbers_scale(factor: float) -> None:
    with pytest.raises(ValueError, match="`factor` must be a positive number"):
        RESULT * factor
    for other in ("2", True, RESULT, None):
        with pytest.raises(TypeError):
            RESULT * other  # type: ignore[operator]


def test_results_of_different_scales_do_not_add() -> None:
    a, b = (nm.fisher_diagonal(MODEL, [x], seed=i) for i, x in enumerate(X.split(32)))
    torch.testing.assert_close((0.5 * a + 0.5 * b)["0.weight"], (0.5 * (a + b))["0.weight"])
    with pytest.raises(
        ValueError, match=r"multiplied by 0.5 like this one, got one that was multiplied by 2\. Add first"
    ):
        0.5 * a + 2 * b


# ------------------------------------------------------------------------------------------------------------- sums


@every_kind
def test_the_same_data_are_not_counted_twice(kind: str) -> None:
    result = RESULTS[kind]()
    for other in (result, RESULTS[kind](), RESULTS[kind](data=batches(16)[:2])):
        with pytest.raises(ValueError, match=r"`other` must be a result over other data, got .*count these twice"):
            result + other


def test_shards_of_a_run_and_other_data_add_up() -> None:
    shards = [nm.fisher_diagonal(MODEL, batches(16), seed=1, shard=(i, 3)) for i in range(3)]
    torch.testing.assert_close(sum(shards)["0.weight"], RESULT["0.weight"])
    with pytest.raises(ValueError, match="over other data"):
        shards[0] + RESULT
    with pytest.raises(ValueError, match="over other data"):
        shards[0] + shards[1] + shards[0]
    other = nm.fisher_diagonal(MODEL, [x + 1 for x, _ in batches(16)], nm.Exact())
    assert (other + nm.fisher_diagonal(MODEL, batches(16), nm.Exact())).count == 128


def test_the_same_data_with_another_seed_are_another_draw_of_the_noise() -> None:
    again = nm.fisher_diagonal(MODEL, batches(16), seed=2)
    torch.testing.assert_close((RESULT + again)["0.weight"], (RESULT["0.weight"] + again["0.weight"]) / 2)
    exact = [nm.fisher_diagonal(MODEL, batches(16), nm.Exact(), seed=seed) for seed in (1, 2)]
    with pytest.raises(ValueError, match=r"the same batches\. Their sum"):  # nothing is random, so that it is the same
        exact[0] + exact[1]


def test_of_two_models_the_model_is_the_reason() -> None:
    """And not a parameter that only one of them has, nor the data, which are the same."""
    other = nm.fisher_diagonal(nn.Sequential(nn.Linear(4, 3)).double(), batches(16), nm.Exact())
    with pytest.raises(
        ValueError, match=r"a result of the model 'Sequential with 67 parameters', got 'Sequential with 15"
    ):
        RESULT + other
    moved = network()
    with torch.no_grad():
        moved[0].bias += 1
    with pytest.raises(ValueError, match="of the same weights, got one of other weights"):
        RESULT + nm.fisher_diagonal(moved, batches(16), nm.Exact())
    part = nm.fisher_diagonal(MODEL, batches(16), seed=1, parameters="0.*")
    with pytest.raises(ValueError, match=r"for the same parameters, got a difference at '2\.bias'"):
        RESULT + part


# ------------------------------------------------------------------------------------------------------------ names


class Tied(nn.Module):
    """An embedding that is the output layer, too, and a frozen layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.frozen, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.frozen(self.embedding(x)))
        return out


TOKENS = [torch.arange(7)]
TIED = nm.fisher_diagonal(Tied(), TOKENS)


def test_a_tied_parameter_is_found_under_each_name() -> None:
    assert list(TIED) == ["embedding.weight", "head.bias"]
    assert torch.equal(TIED["head.weight"], TIED["embedding.weight"])
    assert torch.equal(TIED.stderr["head.weight"], TIED.stderr["embedding.weight"])
    assert "head.weight" in TIED
    with pytest.raises(KeyError, match=r"tied to 'embedding\.weight', which was not selected"):
        TIED.filter("head.*")["head.weight"]


def test_an_unknown_name_says_why() -> None:
    for name, why in (
        ("frozen.weight", "it is frozen"),
        ("embeding.weight", "did you mean 'embedding.weight'"),
        ("head.bios", "did you mean 'head.bias'"),
        ("zzzzzz", "there are 2, such as 'embedding.weight', 'head.bias'"),
    ):
        for mapping in (TIED, TIED.stderr):
            with pytest.raises(KeyError) as caught:
                mapping[name]
            assert str(caught.value).startswith(f"No parameter {name!r} in this result: {why}")  # and no quotes around
        assert name not in TIED
        assert TIED.get(name) is None
    with pytest.raises(KeyError, match="it was filtered out"):
        TIED.filter("head.*")["embedding.weight"]
    with pytest.raises(KeyError):
        TIED[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("0.weight", "0.weight"),
        ("_orig_mod.0.weight", "0.weight"),
        ("module.0.weight", "0.weight"),
        ("_orig_mod.module.0.weight", "0.weight"),
        ("encoder._orig_mod.0.weight", "encoder.0.weight"),
        ("_fsdp_wrapped_module.block._checkpoint_wrapped_module.weight", "block.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_prefixes_of_wrappers_are_no_part_of_a_name(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_a_wrapped_models_names_find_their_parameters() -> None:
    for prefix in ("_orig_mod", "module"):
        for name, parameter in nn.ModuleDict({prefix: MODEL}).named_parameters():
            assert torch.equal(RESULT[name], RESULT[name.removeprefix(f"{prefix}.")])
            assert RESULT[name].shape == parameter.shape


# ------------------------------------------------------------------------------------------------- errors and trace


def test_standard_errors_are_computed_one_at_a_time() -> None:
    class Counted(torch.Tensor):
        divisions = 0

        def __truediv__(self, other: object) -> torch.Tensor:
            Counted.divisions += 1
            return torch.Tensor.__truediv__(self.as_subclass(torch.Tensor), other)

    counted = replace(RESULT, noise={name: noise.as_subclass(Counted) for name, noise in RESULT.noise.items()})
    errors = counted.stderr
    assert (len(errors), list(errors), Counted.divisions) == (4, list(RESULT), 0)
    torch.testing.assert_close(errors["0.weight"], RESULT.noise["0.weight"] / 64)
    assert Counted.divisions == 1
    assert "4 parameters (mean)" in repr(errors)


def test_every_trace_is_one_kind_of_thing() -> None:
    exact = nm.fisher_diagonal(MODEL, batches(16), nm.Exact()).trace.value
    for found in (
        RESULT.trace,
        nm.fisher_trace(MODEL, batches(16)),
        nm.fisher_factors(MODEL, batches(16)).trace,
        nm.fisher_matrix(MODEL, batches(16)).trace,
        nm.fisher_operator(MODEL, batches(16)).trace,
    ):
        assert isinstance(found, nm.TraceEstimate)
        assert float(found) == found.value
        assert f"{found:.3f}" == f"{found.value:.3f}"
        assert f"{found}" == str(found)
        assert abs(found.value - exact) <= 5 * found.stderr + 1e-9 * exact
        assert found.count == 64
    operator = nm.fisher_operator(MODEL, batches(16), reduction="sum")
    assert operator.trace.value == pytest.approx(64 * nm.fisher_operator(MODEL, batches(16)).trace.value)
    assert nm.fisher_matrix(MODEL, batches(16)).trace.stderr == 0


def test_traces_of_scalar_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = network(), nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.scale

    diagonal = nm.fisher_diagonal(Scaled(), batches(16), nm.Exact())
    assert diagonal["scale"].ndim == 0
    assert diagonal["scale"] > 0
    trace = nm.fisher_trace(Scaled(), batches(16), nm.Exact())
    assert trace.value == pytest.approx(diagonal.trace.value, rel=1e-9)


def test_probes_that_are_sent_back_together_are_passes_of_their_own() -> None:
    """Rows that two probes share would be squares of sums, and a spread between passes needs the passes."""
    options = {"reduction": "sum", "seed": 3}
    estimator = nm.MonteCarlo(4)
    rows = nm.fisher_factors(MODEL, batches(16), estimator, "sample", dtype=torch.float64, **options)  # type: ignore[arg-type]
    assert rows.rank == 4 * 64
    norms = rows.rows.square().sum(1).view(4, 4, 16)  # batch, probe, sample
    trace = nm.fisher_trace(MODEL, batches(16), estimator, granularity="sample", **options)  # type: ignore[arg-type]
    assert trace.value == pytest.approx(float(norms.sum()))
    assert trace.stderr == pytest.approx(math.sqrt(4 * float(norms.var(1).sum())))


@pytest.mark.parametrize("granularity", ["batch", "sample"])
@pytest.mark.parametrize("estimator", [nm.Hutchinson(), nm.MonteCarlo()], ids=repr)
def test_standard_errors_of_traces_are_upper_bounds(granularity: str, estimator: nm.Estimator) -> None:
    """The mean square of 100 errors against the mean of the claimed variances, which are at least 1.5 times as large.

    A mean of 100 squares exceeds its expectation by a factor of 1.5 with a probability below 1e-3, and seeds are fixed.
    """
    exact = 64 * nm.fisher_diagonal(MODEL, batches(16), nm.Exact()).trace.value
    options = {"reduction": "sum", "dtype": torch.float64}
    runs = [
        nm.fisher_factors(MODEL, batches(16), estimator, granularity, seed=seed, **options).trace  # type: ignore[arg-type]
        for seed in range(100)
    ]
    errors = torch.tensor([run.value - exact for run in runs])
    claimed = torch.tensor([run.stderr for run in runs]).square().mean()
    assert errors.square().mean() < 1.5 * claimed
    if granularity == "sample":
        matrices = [nm.fisher_matrix(MODEL, batches(16), estimator, seed=s, reduction="sum").trace for s in range(5)]
        for matrix, run in zip(matrices, runs, strict=False):
            assert matrix.value == pytest.approx(run.value)
            assert matrix.stderr >= run.stderr
