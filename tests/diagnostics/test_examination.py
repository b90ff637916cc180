"""What `nm.check` says of a model, its outputs and its data: each claim on a model for which it is true."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import neuromanifold as nm
from neuromanifold.diagnostics.examination import examine
from neuromanifold.problem.problem import Problem
from tests.diagnostics.odd_models import (
    DATA,
    DropsAlways,
    Force,
    HasATable,
    MixesSamples,
    NeedsFour,
    UsedTwice,
    X,
    Y,
    computed,
    network,
)
from tests.problems.networks import PROBLEMS


def checked(model: nn.Module, data: Any = DATA, **options: Any) -> nm.Check:
    return nm.check(model, data, **{"estimators": [nm.Hutchinson()], **options})


def noted(result: nm.Check, *texts: str) -> bool:
    """Whether one note has all of these."""
    return any(all(text in note for text in texts) for note in result.notes)


# ---------------------------------------------------------------------------------- per sample, per batch, and why


def test_all_parameters_of_a_plain_network_are_done_per_sample() -> None:
    result = checked(network())
    assert result.granularity == dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), "sample")
    assert result.reasons == {}
    assert noted(result, "Per sample: 4 of 4 parameters")
    assert not noted(result, "Per batch")


@pytest.mark.parametrize(
    ("model", "names", "reason"),
    [
        (computed(3), {"0.scale", "0.direction"}, "no rule covers the layer"),
        (UsedTwice(), {"layer.weight"}, "used outside of the layer as well"),
        (Force(), {"body.weight", "energy.weight"}, "forward takes derivatives itself"),
        (MixesSamples(), {"layer.weight", "layer.bias"}, "samples influence each other"),
        (DropsAlways(), set(), ""),  # the same random state in all passes of a batch: noise is no difference
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_parameters_that_are_done_per_batch_are_named_with_the_reason(
    model: nn.Module, names: set[str], reason: str
) -> None:
    result = checked(model)
    assert {name for name, how in result.granularity.items() if how == "batch"} == names == set(result.reasons)
    assert all(reason in text for text in result.reasons.values())
    assert bool(names) == noted(result, "Per batch: ", *names, reason, "one backward pass for each sample")
    used = checked(model, DATA[:1]).exact.provenance.granularity
    assert {name for name, how in used.items() if how == "sample, one by one"} == names


def test_a_model_that_cannot_be_hooked_is_named_with_its_error() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            if out.grad_fn is not None and "Addmm" not in out.grad_fn.name():
                raise RuntimeError("no hooks, please")
            return out

    result = checked(Refuses())
    assert set(result.reasons) == {"layer.weight", "layer.bias"}
    assert noted(result, "Per batch", "the model fails with hooks (RuntimeError: no hooks, please)")


def test_it_says_on_how_many_batches_the_plan_was_verified() -> None:
    """The first two; every batch where rows cannot be followed through the graph."""
    for batches, verified in ((1, 1), (2, 2), (3, 2), (6, 2)):
        result = checked(network(), batches=batches)
        assert result.verified == verified
        assert noted(result, f"verified against autograd on {verified} of {batches} batches")
    model = nn.Sequential(nn.Linear(4, 5))
    provenance = nm.fisher_diagonal(model, DATA[:3]).provenance
    assert provenance.verified == examine(Problem.of(model, DATA[:3])).verified


# ---------------------------------------------------------------------------------- evaluations


def test_a_model_that_does_not_repeat_itself_is_seen() -> None:
    result = checked(DropsAlways())
    assert (result.repeats, result.apart) == (False, None)
    assert noted(result, "Two evaluations of the same batch in eval mode differ")
    assert checked(network()).repeats


def test_samples_that_influence_each_other_are_seen_and_what_the_number_means() -> None:
    result = checked(MixesSamples())
    assert (result.repeats, result.apart) == (True, False)
    assert noted(result, "change when it is evaluated without the other samples", "F is then that of p(y | x, other")
    healthy = checked(network())
    assert (healthy.repeats, healthy.apart) == (True, True)
    assert not noted(healthy, "other samples")


@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        (HasATable(), [{"x": X[:16], "table": torch.ones(7, 5)}], "samples cannot be cut out"),
        (NeedsFour(), [X[:16]], ""),
        (network(), [X[:1]], "a single sample"),
        (MixesSamples(), [{"x": X[:16]}], ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_cannot_be_found_out_is_said(model: nn.Module, data: list[Any], why: str) -> None:
    result = checked(model, data)
    assert (result.apart is None) == bool(why)
    assert noted(result, "Whether samples influence each other is not known", why) == bool(why)


# ---------------------------------------------------------------------------------- zeros


def test_parameters_that_nothing_depends_on_are_named() -> None:
    unused = PROBLEMS["frozen and unused"]
    result = checked(unused.model, unused.data)
    assert result.zero == ("unused.weight", "unused.bias")
    assert noted(result, "The outputs do not depend on unused.weight, unused.bias")


def test_a_derivative_inside_of_forward_uses_weights() -> None:
    """F against the definition; only the energy's bias is unused."""
    model = Force()
    result = checked(model)
    assert result.zero == ("energy.bias",)
    assert noted(result, "The outputs do not depend on energy.bias")
    assert not noted(result, "energy.weight is zero")
    expected = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for x in X[:64]:
        logits = model(x[None])[0]
        for y, p in enumerate(logits.softmax(-1).tolist()):
            score = logits.log_softmax(-1)[y]
            g = torch.autograd.grad(score, list(model.parameters()), retain_graph=True, allow_unused=True)
            for name, one in zip(expected, g, strict=True):
                expected[name] += 0 if one is None else p * one.square() / 64
    for name, value in expected.items():
        torch.testing.assert_close(result.exact[name], value, rtol=1e-4, atol=1e-7)


def test_gradients_that_vanish_are_not_called_unused() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()
    result = checked(model)
    assert result.zero == ("0.weight", "0.bias")
    assert noted(result, "F of 0.weight, 0.bias is zero in every entry, though the outputs depend on it")
    assert not noted(result, "do not depend")


# ---------------------------------------------------------------------------------- outputs, labels, data


def test_outputs_that_are_probabilities_are_seen() -> None:
    assert noted(checked(nn.Sequential(network(), nn.Softmax(-1))), "outputs are probabilities")
    assert not noted(checked(nn.Sequential(network(), nn.LogSoftmax(-1))), "probabilities")


def test_a_class_dimension_that_the_labels_contradict_is_an_error() -> None:
    model, data = nn.Conv1d(4, 5, 1), [(torch.randn(3, 4, 7), torch.randint(0, 5, (3, 7)))]
    with pytest.raises(ValueError, match=re.escape("Of logits [3, 5, 7], pass class_dim=1")):
        nm.check(model, data)
    assert "Empirical()" in {row.name for row in nm.check(model, data, class_dim=1).rows}


def test_labels_that_are_no_classes_are_named_where_a_row_is_left_out() -> None:
    """Logits [3, 9, 5] of nine classes at five positions, or of five classes at nine positions: the labels decide."""
    model, data = nn.Conv1d(4, 9, 1), [(torch.randn(3, 4, 5), torch.full((3, 9), 8))]
    result = nm.check(model, data)
    assert not {row.name for row in result.rows} & {"Empirical()", "SquaredBatchGradient()"}
    assert noted(result, "Without Empirical() and SquaredBatchGradient()", "`labels` must be between 0 and 4")
    assert noted(result, "got 8", "if the classes are in another dimension, pass class_dim")
    with pytest.raises(ValueError, match="between 0 and 4"):
        nm.check(model, data, estimators=[nm.Empirical()])
    assert not noted(nm.check(network(), DATA), "Without")


def test_data_that_differ_from_pass_to_pass_are_seen() -> None:
    same, shuffled = (DataLoader(TensorDataset(X, Y), 16, shuffle=shuffle) for shuffle in (False, True))
    assert noted(checked(network(), shuffled), "The data differ from pass to pass", "shuffle=False")
    for data in (same, DATA, iter(DATA)):
        assert not noted(checked(network(), data), "differ")


def test_numbers_are_those_of_the_first_pass() -> None:
    class Growing:
        """Twice as large in each pass."""

        def __init__(self) -> None:
            self.scale = 1.0

        def __iter__(self) -> Any:
            batches = [self.scale * x for x, _ in DATA]
            self.scale *= 2
            return iter(batches)

        def __len__(self) -> int:
            return len(DATA)

    result = checked(network(), Growing())
    assert noted(result, "another batch 0")
    exact = nm.fisher_diagonal(network(), [x for x, _ in DATA[:4]], nm.Exact())
    for name in exact:
        torch.testing.assert_close(result.exact[name], exact[name])


def test_notes_come_instead_of_warnings_and_each_once() -> None:
    result = nm.check(nn.Sequential(MixesSamples(), nn.Softmax(-1)), DATA)  # warnings are errors in tests
    assert len(set(result.notes)) == len(result.notes)
    assert all(a != b for a, b in pairwise(result.notes))


def test_a_function_with_parameters_and_labels_under_another_key() -> None:
    weights = {"w": torch.randn(4, 5, generator=torch.Generator().manual_seed(0))}

    def function(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ parameters["w"]

    data = [{"x": x, "target": y} for x, y in DATA]
    result = nm.check(function, data, parameters=weights, label_key="target")  # type: ignore[arg-type]
    assert "Empirical()" in {row.name for row in result.rows}
    assert set(result.exact) == {"w"}
