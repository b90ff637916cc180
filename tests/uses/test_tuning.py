"""Layers are chosen by their scores within the share, and ranks by the greedy optimum of the stated gain."""

import itertools
import math

import pytest
import torch
from torch import nn

import neuromanifold as nm
from tests.uses.models import bert, diagonal, network, tokens


def test_scores_are_the_sums() -> None:
    model = network(6)
    fim = diagonal(model)
    plan = nm.plan_tuning(model, fim.sum, share=1.0)
    for layer, score in plan.scores.items():
        parts = [(fim[f"{layer}.{kind}"], getattr(model[int(layer)], kind).detach()) for kind in ("weight", "bias")]
        assert score.trace == pytest.approx(sum(float(f.sum()) for f, _ in parts), rel=1e-12)
        assert score.relative == pytest.approx(sum(float((f * w**2).sum()) for f, w in parts), rel=1e-12)
        assert score.mean == pytest.approx(score.trace / score.entries)
    assert plan.chosen == ("0", "2")
    assert plan.parameters == list(fim)


@pytest.mark.parametrize("by", ["mean", "trace", "relative"])
def test_the_highest_scores_within_the_share(by: str) -> None:
    model = bert()
    fim = nm.fisher_diagonal(model, tokens())
    plan = nm.plan_tuning(model, fim, 0.3, by)
    total = sum(score.entries for score in plan.scores.values())
    used = sum(plan.scores[layer].entries for layer in plan.chosen)
    assert used <= 0.3 * total
    best = max(plan.scores, key=lambda layer: getattr(plan.scores[layer], by))
    assert best in plan.chosen
    for layer, score in plan.scores.items():  # what was left out scores less, or has no room
        if layer not in plan.chosen:
            worse = [c for c in plan.chosen if getattr(plan.scores[c], by) >= getattr(score, by)]
            assert sum(plan.scores[c].entries for c in worse) + score.entries > 0.3 * total
    plan.apply(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(plan.parameters)
    assert nm.plan_tuning(bert(), fim, 1e-9, by).chosen == (best,)
    assert f"by {by}" in str(plan)


def test_ranks_have_the_largest_gain_within_the_budget() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    fim = nm.fisher_diagonal(model, [torch.randn(20, 5)])
    plan = nm.plan_lora(model, fim, rank=3)
    names, budget = list(plan.ranks), 3 * sum(plan.costs.values())
    assert plan.entries <= budget

    def gain(ranks: tuple[int, ...]) -> float:
        return sum(plan.traces[n] * math.log(r) for n, r in zip(names, ranks, strict=True))

    best = max(
        gain(ranks)
        for ranks in itertools.product(range(1, 6), repeat=3)
        if sum(r * plan.costs[n] for n, r in zip(names, ranks, strict=True)) <= plan.entries
    )
    assert gain(tuple(plan.ranks.values())) == pytest.approx(best, rel=1e-9)


def test_the_configuration_is_one_for_peft() -> None:
    peft = pytest.importorskip("peft")
    model = bert()
    fim = nm.fisher_diagonal(model, tokens())
    plan = nm.plan_lora(model, fim, 3, ["*.query.weight", "*.value.weight", "*.dense.weight"])
    assert len(set(plan.ranks.values())) > 1
    adapted = peft.get_peft_model(model, peft.LoraConfig(**plan.config()))
    found = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight"): len(parameter)
        for name, parameter in adapted.named_parameters()
        if "lora_A" in name
    }
    assert found == plan.ranks
    assert plan.entries == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert "query" in str(plan)


def test_bad_input() -> None:
    model = network()
    fim = diagonal(model)
    for share in (0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="`share`"):
            nm.plan_tuning(model, fim, share)
    with pytest.raises(ValueError, match="`by` must be 'mean', 'trace' or 'relative'"):
        nm.plan_tuning(model, fim, by="magic")
    with pytest.raises(ValueError, match=r"0\.weight has shape \[5, 3\]"):
        nm.plan_tuning(network(5), fim)
    with pytest.raises(ValueError, match="`rank`"):
        nm.plan_lora(model, fim, 0)
    with pytest.raises(ValueError, match="a selection with matrices"):
        nm.plan_lora(model, fim, 2, "*.bias")
    with pytest.raises(ValueError, match="the model that the plan was made for"):
        nm.plan_tuning(model, fim).apply(nn.Linear(2, 2))
