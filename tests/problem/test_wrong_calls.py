"""Calls that would give a confident but wrong number get an error, or a warning, that says what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.problem import Problem
from neuromanifold.problem.suspicions import SamplesMixWarning, SuspiciousInputWarning, samples_influence_each_other

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, 1, 0])
TOKENS = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(1))
WORDS = torch.zeros(5, 7, dtype=torch.long)


class Calls(nn.Module):
    """A model whose forward is the function given, of a linear layer and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.forward = lambda *args, **kwargs: function(self.layer, *args, **kwargs)  # type: ignore[method-assign]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.layer(u + v)


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        return scale * self.layer(batch["a"] + batch["b"])


class Decoder(nn.Linear):
    """Takes inputs of its decoder and says nothing of how to make them."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        del decoder_input_ids
        return super().forward(x)


class Masked(nn.Module):
    """Puts virtual tokens in front, as prompt tuning does."""

    def __init__(self, added: int = 2) -> None:
        super().__init__()
        self.layer, self.added = nn.Linear(4, 3), added

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        del attention_mask
        return self.layer(torch.cat([x[:, :1].expand(-1, self.added, -1), x], 1))


def evaluate(model: Any, item: object, estimator: nm.Estimator | None = None, **options: Any) -> Outputs:
    """What a run does with its first batch."""
    problem = Problem.of(model, [item], **options)
    with problem.session():
        batch = next(problem.batches())
        outputs = problem.evaluate(batch, estimator)
        problem.distributions(outputs)
        problem.inspect(batch, outputs)
    return outputs


LINEAR = nn.Linear(4, 3)
SCALARS = Calls(lambda layer, x: layer(x)[:, 0])
CLASSES_FIRST = Calls(lambda layer, x: layer(x).transpose(1, 2))
TIME_FIRST = Calls(lambda layer, x: layer(x).transpose(0, 1))

ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "labels of another shape": (
        lambda: evaluate(LINEAR, (X, Y[:3])),
        r"Batch 0 of `data`: `labels` must be of shape \[5\] \(class labels\) or \[5, 3\].*got shape \[3\].*Leave out",
    ),
    "labels with a dimension of size 1": (
        lambda: evaluate(LINEAR, (TOKENS, WORDS[:, None])),
        r"`labels`.*\[5, 7\].*got shape \[5, 1, 7\].*squeeze",
    ),
    "labels that are no integers": (
        lambda: evaluate(LINEAR, (X, Y.float())),
        r"`labels` must be integers of shape \[5\], got float32 of shape \[5\]\. Convert them with \.long\(\)",
    ),
    "targets without a dimension for the outputs": (
        lambda: evaluate(LINEAR, (X[:3], X[:3, 0]), likelihood=nm.Gaussian),
        r"`labels` must be targets of shape \[3, 3\], got float32 of shape \[3\]",
    ),
    "labels of fewer positions than the model makes": (
        lambda: evaluate(Masked(), ({"x": TOKENS, "attention_mask": WORDS}, WORDS)),
        r"`labels`.*\[5, 9\].*got shape \[5, 7\].*virtual tokens.*ignore_index",
    ),
    "a mask of another shape": (
        lambda: evaluate(Masked(), {"x": TOKENS, "attention_mask": WORDS}),
        r"`attention_mask` must be of shape \[5, 9\], the logits' positions, got shape \[5, 7\].*virtual tokens",
    ),
    "a mask that is added to attention scores": (
        lambda: evaluate(Masked(0), {"x": TOKENS, "attention_mask": torch.where(WORDS > 0, 0.0, -1e4)}),
        r"`attention_mask` must be 1 at positions that count and 0 at others, got.*added.*bool mask",
    ),
    "a mask that would be added, with nothing masked": (
        lambda: evaluate(Masked(0), {"x": TOKENS, "attention_mask": torch.zeros(5, 7)}),
        r"`attention_mask` must be 1 at positions that count",
    ),
    "class_dim forgotten": (
        lambda: evaluate(CLASSES_FIRST, (TOKENS, WORDS)),
        r"`labels`.*got shape \[5, 7\]\. Of logits \[5, 3, 7\], pass class_dim=1",
    ),
    "batch_dim forgotten": (
        lambda: evaluate(TIME_FIRST, TOKENS),
        r"`logits` must be .* with the inputs' 5 samples in dimension 0, got shape \[7, 5, 3\]\. Pass batch_dim=1",
    ),
    "a batch_dim too many": (
        lambda: evaluate(LINEAR, WORDS[..., None].expand(5, 7, 4).float()[:, 0][:, None].expand(5, 7, 4), batch_dim=2),
        "`batch_dim`",
    ),
    "the second input is taken for labels": (
        lambda: evaluate(TwoInputs(), (X, X)),
        r"missing a required argument: 'v'.*1 input\(s\) and labels.*u, v.*yield \(\(a, b\), labels\), or a dict",
    ),
    "labels under another key": (
        lambda: evaluate(LINEAR, {"input": X, "label": Y}),
        r"unexpected keyword argument 'label'.*keys input, label.*'labels'.*label_key=",
    ),
    "labels are needed and are under another key": (
        lambda: evaluate(Calls(lambda layer, x, **_: layer(x)), {"x": X, "target": Y}, nm.Empirical()),
        r"`labels` must be given for Empirical\(\), got none under 'labels' \(keys: x, target\).*label_key",
    ),
    "a dict of which no key is an argument": (
        lambda: evaluate(LINEAR, {"pixels": X}),
        r"dict itself, since none of its keys \(pixels\) is 'input', got TypeError.*Rename a key to 'input'",
    ),
    "(x, y, index)": (
        lambda: evaluate(LINEAR, (X, Y, Y)),
        r"tuple of length 3\. .*\[\(x, y\) for x, y, \*_ in loader\].*\(\(a, b\), labels\)",
    ),
    "one output for each sample": (
        lambda: evaluate(SCALARS, X),
        r"`logits` must be of shape \[batch, \.\.\., classes\], got shape \[5\].*nm\.Bernoulli or nm\.Gaussian",
    ),
    "a sample instead of a batch": (
        lambda: evaluate(LINEAR, X[0], likelihood=nm.Gaussian),
        r"`logits` must be a tensor with the inputs' 4 samples in dimension 0, got shape \[3\]",
    ),
    "a function": (
        lambda: evaluate(torch.sigmoid, X),
        r"`model` must be a torch\.nn\.Module, got sigmoid\..*parameters=\{name: tensor",
    ),
    "a method": (lambda: evaluate(LINEAR.forward, X), "Pass the module itself"),
    "a function with a parameter that is no tensor": (
        lambda: evaluate(lambda p, x: x @ p["w"], X, parameters={"w": 3}),
        r"`parameters` must be floating-point tensors by name, got int for 'w'",
    ),
    "a decoder without inputs": (
        lambda: evaluate(Decoder(), {"x": TOKENS, "labels": WORDS}),
        r"`decoder_input_ids` must be given, got labels only.*Add them",
    ),
    "label_key that is no string": (lambda: Problem.of(LINEAR, [X], label_key=1), "`label_key`"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_to_do(name: str) -> None:
    call, text = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=text):
        call()


WARNINGS: dict[str, tuple[Callable[[], object], str]] = {
    "probabilities": (
        lambda: evaluate(Calls(lambda layer, x: layer(x).softmax(-1)), X),
        "outputs are probabilities.*each row sums to one",
    ),
    "probabilities in half precision": (
        lambda: evaluate(Calls(lambda layer, x: layer(x).softmax(-1)).bfloat16(), X.bfloat16()),
        "outputs are probabilities",
    ),
    "a single row of probabilities": (
        lambda: evaluate(Calls(lambda layer, x: layer(x).softmax(-1)), X[:1]),
        "outputs are probabilities",
    ),
    "probabilities of single outputs": (
        lambda: evaluate(Calls(lambda layer, x: layer(x).sigmoid()), TOKENS, likelihood=nm.Bernoulli),
        "between 0 and 1.*last sigmoid",
    ),
    "positions first, as many as samples": (
        lambda: evaluate(Calls(lambda layer, x: layer(x).transpose(0, 1)), TOKENS[:, :5]),
        r"Without the last sample.*inputs' 4 samples in dimension 0.*Pass batch_dim=1",
    ),
    "labels that are no class": (
        lambda: evaluate(LINEAR, (X, Y.where(Y > 0, 255))),
        r"between 0 and 2 or -100 \(ignore_index\), got 255 for 2 of 5 positions.*ignore_index=255",
    ),
    "single outputs to be left out": (
        lambda: evaluate(LINEAR, (X, torch.full((5, 3), -100)), likelihood=nm.Bernoulli),
        "single outputs cannot be left out",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_says_what_is_assumed(name: str) -> None:
    call, text = WARNINGS[name]
    with pytest.warns(SuspiciousInputWarning, match=text):
        call()


SOFTMAX = Calls(lambda layer, x: layer(x).softmax(-1))
CENTRED = Calls(lambda layer, x: layer(x - x.mean(0)) ** 2)
NO_CLASS = r"between 0 and 2 or -100 \(ignore_index\), got 255"
LATER: dict[str, tuple[nn.Module, list[Any], str]] = {  # what the first batch does not show
    "probabilities, one by one": (SOFTMAX, [x[None] for x in X], "outputs are probabilities"),
    "probabilities, after an empty batch": (SOFTMAX, [X[:0], X], "outputs are probabilities"),
    "a label that is no class": (LINEAR, [(X, Y), (X, Y), (X, Y.where(Y > 0, 255))], NO_CLASS),
    "mixed samples, after a single one": (CENTRED, [X[:1], X], "depends on how"),
    "mixed samples, after an empty batch": (CENTRED, [X[:0], X], "depends on how"),
    "mixed samples, after ignored ones": (CENTRED, [(X, torch.full_like(Y, -100)), (X, Y)], "depends on how"),
}


def products(model: nn.Module, data: list[Any]) -> object:
    return nm.fisher_operator(model, data) @ torch.ones(15)


def bounds(model: nn.Module, data: list[Any]) -> object:
    return nm.fisher_bounds(model, data)


@pytest.mark.parametrize("call", [nm.fisher_diagonal, nm.fisher_trace, products, bounds])
@pytest.mark.parametrize("name", LATER)
def test_what_only_later_batches_show_is_warned_of(name: str, call: Callable[..., object]) -> None:
    model, data, text = LATER[name]
    if call is products and "ignored" in name:
        pytest.skip("an operator looks at the first two batches with samples")
    if call is bounds and "label" in name:  # bounds compare with the empirical matrix
        wrong = pytest.raises(ValueError, match=r"Batch 2.*between 0 and 2, got labels from 1 to 255")
        with pytest.warns(SuspiciousInputWarning, match=text), wrong:
            call(model, data)
        return
    with pytest.warns(SuspiciousInputWarning, match=text):
        call(model, data)


def test_labels_are_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nm.fisher_diagonal(LINEAR, [(X, Y.where(Y > 0, 255))] * 3)
    assert len([w for w in caught if "255" in str(w.message)]) == 1


ACCEPTED: dict[str, tuple[Callable[[], Outputs], tuple[int, ...]]] = {
    "log-probabilities": (lambda: evaluate(Calls(lambda layer, x: layer(x).log_softmax(-1)), X), (5, 3)),
    "class_dim": (lambda: evaluate(CLASSES_FIRST, (TOKENS, WORDS), class_dim=1), (5, 7, 3)),
    "batch_dim": (lambda: evaluate(LINEAR, (TOKENS.transpose(0, 1), WORDS.T), batch_dim=1), (5, 7, 3)),
    "two inputs and labels": (lambda: evaluate(TwoInputs(), ((X, X), Y)), (5, 3)),
    "two inputs by name": (lambda: evaluate(TwoInputs(), {"u": X, "v": X, "labels": Y}), (5, 3)),
    "label_key": (lambda: evaluate(LINEAR, {"input": X, "label": Y}, nm.Empirical(), label_key="label"), (5, 3)),
    "a model of one dict": (lambda: evaluate(TakesDict(), {"a": X, "b": X, "labels": Y}), (5, 3)),
    "a model of one dict, and labels": (lambda: evaluate(TakesDict(), ({"a": X, "b": X}, Y)), (5, 3)),
    "a model of one dict by its name": (lambda: evaluate(TakesDict(), {"batch": {"a": X, "b": X}}), (5, 3)),
    "one output for each sample": (lambda: evaluate(SCALARS, (X, Y), likelihood=nm.Gaussian), (5, 1)),
    "a function": (
        lambda: evaluate(lambda p, x: x @ p["w.a"], X, parameters={"w.a": torch.ones(4, 3)}),
        (5, 3),
    ),
    "rows of all positions": (lambda: evaluate(Calls(lambda layer, x: layer(x).flatten(0, 1)), TOKENS), (35, 3)),
    "a mask of inputs that are pooled": (
        lambda: evaluate(Calls(lambda layer, x, **_: layer(x).mean(1)), {"x": TOKENS, "attention_mask": WORDS}),
        (5, 3),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_clear_is_accepted(name: str) -> None:
    call, shape = ACCEPTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call().logits.shape == shape


def test_log_probabilities_are_logits() -> None:
    """They differ from logits by a constant for each row, which changes no Fisher information."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    logits = nm.fisher_diagonal(model, [X.double()], nm.Exact())
    log_probabilities = nm.fisher_diagonal(nn.Sequential(*model, nn.LogSoftmax(-1)), [X.double()], nm.Exact())
    for name in logits:
        torch.testing.assert_close(logits[name], log_probabilities[name])


def test_ignored_labels_of_a_single_output_do_not_count() -> None:
    labels = torch.tensor([0, 1, -100, 1, -100])
    for one in (labels, labels[:, None]):
        outputs = evaluate(SCALARS, (X, one), likelihood=nm.Bernoulli)
        assert (int(outputs.samples), outputs.labels.shape) == (3, (5, 1))


class EncoderDecoder(nn.Module):
    """As transformers have them: without inputs of the decoder it would take those of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return torch.where(labels == -100, 0, labels).roll(1, 1)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        return self.head(self.words(input_ids if decoder_input_ids is None else decoder_input_ids))


@pytest.mark.parametrize("ignored", [-100, 5])
def test_decoder_inputs_come_from_labels(ignored: int) -> None:
    labels = torch.tensor([[1, 2, 3], [4, 1, ignored]])
    given = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": labels}
    model = EncoderDecoder()
    outputs = evaluate(model, given, ignore_index=ignored)
    assert outputs.logits.shape == (2, 3, 6)
    assert int(outputs.positions) == 5
    ids = torch.where(labels == ignored, 0, labels).roll(1, 1)
    again = evaluate(model, {**given, "decoder_input_ids": ids}, ignore_index=ignored)
    assert torch.equal(outputs.logits, again.logits)


class Centred(nn.Module):
    """Subtracts the mean over the batch, of which single samples know nothing."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.layer, self.strength = nn.Linear(4, 3), strength

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - self.strength * x.mean(0))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


def influence(model: nn.Module, item: object, **options: Any) -> bool | None:
    problem = Problem.of(model, [item], **options)
    with problem.session():
        batch = next(problem.batches())
        return samples_influence_each_other(problem, batch, problem.evaluate(batch))


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_samples_that_influence_each_other_are_found(samples: int) -> None:
    x = X[:samples]
    assert influence(Centred(1.0), x) is True
    assert influence(Centred(0.0), x) is False
    assert influence(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), x) is False  # in eval mode
    normalised = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    assert influence(normalised, x) is True  # though it refuses single samples
    with pytest.warns(SamplesMixWarning, match=r"without the other samples.*p\(y \| x, other samples.*batched"):
        evaluate(Centred(1.0), x)


def test_samples_whose_influence_cannot_be_seen() -> None:
    assert influence(LINEAR, X[:1]) is None
    assert influence(Noisy(), X) is None
    assert influence(Calls(lambda layer, x: layer(x.view(5, 4))), X) is False  # though it fails on fewer samples
    assert influence(Calls(lambda layer, x, table: layer(x) + table.sum()), ((X, torch.ones(7)), Y)) is None
    assert influence(LINEAR, TOKENS.transpose(0, 1), batch_dim=1) is False
    masked = Calls(lambda layer, x: layer(x - x.mean(0)) + torch.tensor([0.0, 0.0, -1e9]))
    assert influence(masked, X) is True
