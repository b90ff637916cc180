"""Optimizers that divide by the Fisher information: values, steps, states, and everything around a training loop."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from neuromanifold.uses.training.optim import FisherOptimizer
from tests.zscores import allowed_z_score, worst_z_score

Make = Callable[..., FisherOptimizer]
BOTH = pytest.mark.parametrize("make", [nm.optim.FisherSGD, nm.optim.FisherAdam])


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 3, dtype=dtype), torch.randint(4, (6,))) for _ in range(steps)]


def train(model: nn.Module, optimizer: FisherOptimizer, data: list[tuple[Tensor, Tensor]], first: int = 0) -> None:
    for number, (x, y) in enumerate(data, first):
        logits = model(x)
        if number % 3 == 0:
            optimizer.update_fisher(logits)
        cross_entropy(logits, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_updates_are_unbiased_for_the_diagonal_per_distribution() -> None:
    model, ((x, _),) = network(), batches(1)
    exact = nm.fisher_diagonal(model, [x], nm.Exact())
    found = []
    for seed in range(400):
        optimizer = nm.optim.FisherAdam(model.parameters(), fisher_decay=0.0, seed=seed)
        optimizer.update_fisher(model(x))
        found.append(torch.cat([optimizer.state[p]["fisher"].flatten() for p in model.parameters()]))
    expected = torch.cat([value.flatten() for value in exact.values()])
    assert worst_z_score(torch.stack(found), expected) < allowed_z_score(len(expected))
    assert worst_z_score(torch.stack(found), expected / 6) > allowed_z_score(len(expected))


def test_only_positions_in_the_mask_count() -> None:
    model = network()
    x, mask = torch.randn(2, 3, 3, dtype=torch.float64), torch.tensor([[True, True, False], [True, False, False]])
    masked, alone = (nm.optim.FisherAdam(model.parameters(), fisher_decay=0.0) for _ in range(2))
    masked.update_fisher(model(x), mask)
    alone.update_fisher(model(x[mask]))
    for p in model.parameters():
        torch.testing.assert_close(masked.state[p]["fisher"], alone.state[p]["fisher"])
    assert masked.param_groups[0]["positions"] == 3


def by_hand(model: nn.Module, kind: str, data: list[tuple[Tensor, Tensor]], fishers: list[list[Tensor]]) -> None:
    """The equations of the docstrings, entry by entry."""
    lr, wd, decay, beta, damping, clip = 0.05, 0.1, 0.8, 0.7, 0.03, 0.9
    parameters, average = list(model.parameters()), [torch.zeros_like(p) for p in model.parameters()]
    b, updates = [torch.zeros_like(p) for p in parameters], 0
    for number, (x, y) in enumerate(data):
        if number % 3 == 0:
            average = [decay * a + (1 - decay) * f for a, f in zip(average, fishers[updates], strict=True)]
            updates += 1
        gradients = torch.autograd.grad(cross_entropy(model(x), y), parameters)
        for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            f = average[i] / (1 - decay**updates)
            for j in range(p.numel()):
                old, gradient = float(p.detach().view(-1)[j]), float(g.reshape(-1)[j])
                if kind == "FisherSGD":
                    b[i].view(-1)[j] = beta * b[i].view(-1)[j] + gradient / (f.view(-1)[j] + damping)
                    change = lr * float(b[i].view(-1)[j])
                else:
                    b[i].view(-1)[j] = beta * b[i].view(-1)[j] + (1 - beta) * gradient
                    ratio = float(b[i].view(-1)[j]) / (1 - beta ** (number + 1))
                    ratio /= math.sqrt(f.view(-1)[j] / 6) + 1e-8
                    change = lr * max(-clip, min(clip, ratio))
                p.data.view(-1)[j] = (1 - lr * wd) * old - change


@BOTH
def test_steps_are_those_of_the_equations(make: Make) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "fisher_decay": 0.8}
    adam = make is nm.optim.FisherAdam
    settings |= {"beta": 0.7, "clip": 0.9} if adam else {"momentum": 0.7, "damping": 0.03}
    model, data = network(), batches(7)
    optimizer = make(model.parameters(), **settings)
    fishers: list[list[Tensor]] = []
    update = optimizer.update_fisher

    def watched(logits: Tensor) -> None:
        before = [optimizer.state[p].get("fisher", torch.zeros(())).clone() for p in model.parameters()]
        update(logits)
        after = [optimizer.state[p]["fisher"] for p in model.parameters()]
        fishers.append([(a - 0.8 * b) / 0.2 for a, b in zip(after, before, strict=True)])

    optimizer.update_fisher = watched  # type: ignore[assignment, method-assign]
    train(model, optimizer, data)
    slow = network()
    by_hand(slow, make.__name__, data, fishers)  # type: ignore[attr-defined]
    for p, q in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_run_goes_on_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    data = batches(10, dtype)

    def start() -> tuple[nn.Sequential, FisherOptimizer, Any]:
        model = network(dtype)
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "weight_decay": 0.1}]
        optimizer = make(groups, seed=4)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    model, optimizer, scheduler = start()
    train(model, optimizer, data[:5])
    scheduler.step()
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, optimizer, scheduler)], file)
    file.seek(0)
    other = start()
    for one, state in zip(other, torch.load(file, weights_only=True), strict=True):
        one.load_state_dict(state)
    for m, o, _ in ((model, optimizer, scheduler), other):
        train(m, o, data[5:], first=5)
    for p, q in zip(model.parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p]["fisher"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert optimizer.param_groups[0]["lr"] == other[1].param_groups[0]["lr"] == pytest.approx(0.018)
    assert optimizer.param_groups[0]["updates"] == 4


@BOTH
def test_copies_go_on_alike(make: Make) -> None:
    model, data = network(), batches(6)
    optimizer = make(model.parameters(), seed=3, likelihood=nm.Bernoulli)
    optimizer.update_fisher(model(data[0][0]))
    same, again = copy.deepcopy((model, optimizer))
    assert again.seed == 3
    assert again.likelihood is nm.Bernoulli
    for m, o in ((model, optimizer), (same, again)):
        train(m, o, data[:4])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), same.parameters(), strict=True))


def test_gradients_and_graphs_are_left_alone_so_that_they_can_accumulate() -> None:
    model, other, data = network(), network(), batches(2)
    optimizer = nm.optim.FisherAdam(model.parameters())
    for x, y in data:
        logits = model(x)
        optimizer.update_fisher(logits)
        (cross_entropy(logits, y) / 2).backward()  # type: ignore[no-untyped-call]
        (cross_entropy(other(x), y) / 2).backward()  # type: ignore[no-untyped-call]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["updates"] == 2


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_with_a_scaler(make: Make, dtype: torch.dtype) -> None:
    model, (x, y) = network(torch.float32), batches(1, torch.float32)[0]
    optimizer, scaler = make(model.parameters(), lr=0.02), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for number in range(30):
        with torch.autocast("cpu", dtype):
            logits = model(x)
            if number % 5 == 0:
                optimizer.update_fisher(logits)
            loss = cross_entropy(logits, y)
        scaler.scale(loss).backward()
        if number == 7:
            model[0].weight.grad[0, 0] = math.inf
            before = model[2].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if number == 7:
            assert torch.equal(model[2].weight, before)  # the scaler skips such a step
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    reference = nm.fisher_diagonal(model, [x], nm.Exact())
    for name, p in model.named_parameters():
        assert 0.01 < float(optimizer.state[p]["fisher"].sum() / reference[name].sum()) < 100


def test_groups_frozen_parameters_and_closures() -> None:
    model, (x, y) = network(), batches(1)[0]
    model[0].bias.requires_grad_(False)
    optimizer = nm.optim.FisherSGD(model[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.0})
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.update_fisher(model(x))

    def closure() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert optimizer.step(closure) > 0  # type: ignore[operator]
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, False, False]
    model[0].bias.requires_grad_(True)
    optimizer.update_fisher(model(x))
    assert optimizer.state[model[0].bias]["fisher"].sum() > 0


def test_a_language_model_of_transformers_learns() -> None:
    transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )
    ids = torch.randint(13, (4, 6))
    optimizer, losses = nm.optim.FisherAdam(model.parameters(), lr=1e-2), []
    for number in range(25):
        output = model(input_ids=ids, labels=ids)
        if number % 4 == 0:
            optimizer.update_fisher(output.logits, mask=torch.arange(6).expand(4, 6) < 5)  # the last predicts nothing
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_wrong_calls() -> None:
    model, (x, y) = network(), batches(1)[0]
    adam, sgd = nm.optim.FisherAdam, nm.optim.FisherSGD
    for make, argument, value in (
        (adam, "lr", -1.0),
        (adam, "clip", 0.0),
        (adam, "eps", 0.0),
        (adam, "beta", 1.0),
        (sgd, "damping", 0.0),
        (sgd, "momentum", -0.1),
        (sgd, "weight_decay", math.nan),
        (sgd, "fisher_decay", 1.0),
        (sgd, "seed", -1),
    ):
        with pytest.raises(ValueError, match=f"`{argument}` must be "):
            make(model.parameters(), **{argument: value})
    optimizer = adam(model.parameters())
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"call optimizer\.update_fisher\(logits\) before the first step"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"`logits` must be part of a graph.*no_grad"):
        optimizer.update_fisher(model(x).detach())
    with pytest.raises(ValueError, match=r"`mask` must be bool of shape \[6\], got torch.float32 of shape \[6\]"):
        optimizer.update_fisher(model(x), torch.ones(6))
    with pytest.raises(ValueError, match="`mask` must be True at one position or more"):
        optimizer.update_fisher(model(x), torch.zeros(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="NaN"):
        optimizer.update_fisher(model(x) * math.nan)
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = adam(sparse.parameters())
    logits = sparse(torch.arange(5))
    optimizer.update_fisher(logits)
    logits.sum().backward()
    with pytest.raises(ValueError, match=r"`gradients` must be dense.*sparse=False"):
        optimizer.step()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, _) = network(), batches(1)[0]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(NotImplementedError, match="`optimizer` must be used in a single process, got 2"):
        nm.optim.FisherAdam(model.parameters()).update_fisher(model(x))
