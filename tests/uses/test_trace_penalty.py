"""The trace penalty: its value and its gradient against slow references in float64, and by z-scores."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.zscores import allowed_z_score, worst_z_score

LIKELIHOODS = pytest.mark.parametrize("likelihood", [nm.Categorical, nm.Bernoulli, nm.Gaussian])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[2].weight *= 5  # confident predictions, with which M changes
    return model


X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def slow_trace(model: nn.Module, x: Tensor, likelihood: Any, detach: bool = False) -> Tensor:
    """Σ_n Σ_c ‖J_nᵀ S_c‖²/B by one backward pass for each sample and column, differentiable."""
    total, parameters = torch.zeros(()).double(), list(model.parameters())
    for one in x:
        z = model(one[None])
        factor = likelihood(z.detach() if detach else z).factor_matrix()[0]
        for column in factor.T:
            gradients = torch.autograd.grad(z, parameters, column[None], create_graph=True)
            total = total + sum(g.square().sum() for g in gradients)
    return total / len(x)


def gradient(model: nn.Module, value: Tensor) -> Tensor:
    gradients = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def draws(model: nn.Module, count: int, likelihood: Any, **options: Any) -> tuple[Tensor, Tensor]:
    generator, values, gradients = torch.Generator().manual_seed(7), [], []
    for _ in range(count):
        value = nm.trace_penalty(model, model(X), likelihood=likelihood, generator=generator, **options)
        values.append(value.detach())
        gradients.append(gradient(model, value))
    return torch.stack(values)[:, None], torch.stack(gradients)


@LIKELIHOODS
def test_value_and_gradient_are_unbiased(likelihood: Any) -> None:
    model = network()
    truth = slow_trace(model, X, likelihood)
    assert float(nm.fisher_trace(model, [X], nm.Exact(), likelihood)) == pytest.approx(float(truth.detach()))
    expected = gradient(model, truth)
    values, gradients = draws(model, 300, likelihood)
    allowed = allowed_z_score(len(expected) + 1)
    assert worst_z_score(values, truth.detach()[None]) < allowed
    assert worst_z_score(gradients, expected) < allowed
    assert worst_z_score(values, truth.detach()[None] * len(X)) > allowed  # the sum taken for the mean
    detached = gradient(model, slow_trace(model, X, likelihood, detach=True))
    same = likelihood is nm.Gaussian  # whose metric does not depend on the outputs
    assert (worst_z_score(gradients, detached) > allowed) != same


def test_detached_gradients_hold_the_metric_constant() -> None:
    model = network()
    expected = gradient(model, slow_trace(model, X, nm.Categorical, detach=True))
    values, gradients = draws(model, 300, nm.Categorical, detach=True)
    assert worst_z_score(gradients, expected) < allowed_z_score(len(expected))
    assert torch.equal(values[:30], draws(model, 30, nm.Categorical)[0])


def test_the_gradient_is_that_of_the_value_for_the_same_signs() -> None:
    model = network()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def penalty(*values: Tensor) -> Tensor:
        class Called(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: Tensor) -> Tensor:
                return nm.trace_penalty(model, model(x), generator=torch.Generator().manual_seed(3))

        named = {f"inner.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(Called(), named, (X,))  # type: ignore[no-any-return]

    copies = [p.detach().clone().requires_grad_() for p in parameters]
    assert torch.autograd.gradcheck(penalty, copies)


def test_masked_positions_do_not_count() -> None:
    model, x = network(), torch.randn(3, 2, 3, dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    generator = torch.Generator().manual_seed(0)
    values = [nm.trace_penalty(model, model(x), mask=mask, generator=generator).detach() for _ in range(400)]
    expected = slow_trace(model, x[mask], nm.Categorical).detach() * 3 / 2  # three positions of two samples
    assert worst_z_score(torch.stack(values)[:, None], expected[None]) < allowed_z_score(1)


def test_a_part_of_the_parameters_and_a_training_step() -> None:
    model = network()
    logits = model(X)
    value = nm.trace_penalty(model, logits, parameters="2.*")
    (nn.functional.cross_entropy(logits, torch.zeros(5, dtype=torch.long)) + 0.1 * value).backward()
    assert all(p.grad is not None for p in model.parameters())
    exact = nm.fisher_trace(model, [X], nm.Exact(), parameters="2.*")
    assert 0 < float(value.detach()) < 20 * float(exact)


def gpt2(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
    size = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "attn_implementation": attention}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=13, **size))  # type: ignore[no-any-return]


def test_a_language_model_of_transformers() -> None:
    model: Any = gpt2("eager")
    output = model(input_ids=torch.randint(13, (2, 5)))
    nm.trace_penalty(model, output.logits).backward()  # type: ignore[no-untyped-call]
    assert float(model.transformer.wte.weight.grad.abs().sum()) > 0


def test_wrong_calls() -> None:
    model = network()
    logits = model(X)
    with pytest.raises(ValueError, match=r"`logits` must be part of a graph"):
        nm.trace_penalty(model, logits.detach())
    with pytest.raises(ValueError, match=r"`mask` must be bool of shape \[5\]"):
        nm.trace_penalty(model, logits, mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="`mask` must be True at one position"):
        nm.trace_penalty(model, logits, mask=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="`logits` must be outputs of `model`"):
        nm.trace_penalty(network(), logits)
    with pytest.raises(ValueError, match="`parameters` must be a selection that matches"):
        nm.trace_penalty(model, logits, "5.*")
    with pytest.raises(ValueError, match="`logits` must be of bfloat16"):
        nm.trace_penalty(model, logits.half())
    with pytest.raises(TypeError, match="`likelihood`"):
        nm.trace_penalty(model, logits, likelihood=lambda z: z)  # type: ignore[arg-type, return-value]
    recurrent = nn.LSTM(3, 4, batch_first=True)
    with pytest.raises(
        ValueError, match="`model` must be twice differentiable, got one with the fused operation Mkldnn"
    ):
        nm.trace_penalty(recurrent, recurrent(torch.randn(2, 3, 3))[0])
    fused: Any = gpt2("sdpa").eval()
    with pytest.raises(ValueError, match=r"fused operation ScaledDotProduct.*attn_implementation='eager'"):
        nm.trace_penalty(fused, fused(input_ids=torch.randint(13, (2, 5))).logits)
