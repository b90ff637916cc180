"""Pruning leaves out what the equation says, and predicts the loss that it says."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import neuromanifold as nm
from tests.uses.models import bert, diagonal, moved, network, tokens


def saliencies(model: nn.Module, fim: nm.DiagonalFisher) -> dict[str, Tensor]:
    return {name: 0.5 * fim.mean[name] * p.detach() ** 2 for name, p in model.named_parameters()}


def images_network() -> tuple[nn.Module, nm.DiagonalFisher]:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*convolutions, nn.Linear(64, 3)).double()
    return model, nm.fisher_diagonal(model, [torch.randn(6, 4, 4, 4, dtype=torch.float64)], nm.Exact())


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_least_salient_entries_go(sparsity: float, scope: str) -> None:
    model = network(7)
    fim = diagonal(model)
    plan = nm.plan_pruning(model, fim.sum, sparsity, scope=scope)
    found = saliencies(model, fim)
    assert set(plan.masks) == {"0.weight", "2.weight"}
    parts = [["0.weight", "2.weight"]] if scope == "global" else [["0.weight"], ["2.weight"]]
    for names in parts:
        scores = sorted(s for name in names for s in found[name].flatten().tolist())
        gone = sorted(s for name in names for s in found[name][~plan.masks[name]].tolist())
        assert gone == scores[: int(sparsity * len(scores) + 1e-6)]
    expected = sum(float(found[name][~mask].sum()) for name, mask in plan.masks.items())
    assert plan.loss_increase == pytest.approx(expected, rel=1e-12)


def test_no_other_choice_predicts_less() -> None:
    model = network(2)
    fim = diagonal(model)
    plan = nm.plan_pruning(model, fim, 0.5)
    every = torch.cat([saliencies(model, fim)[name].flatten() for name in plan.masks]).tolist()
    best = min(sum(chosen) for chosen in itertools.combinations(every, len(every) // 2))
    assert plan.loss_increase == pytest.approx(best, rel=1e-12)
    by_magnitude = nm.plan_pruning(model, fim, 0.5, score="magnitude")
    assert by_magnitude.loss_increase > plan.loss_increase


def test_magnitudes_decide_among_equal_scores() -> None:
    model = network()
    fim = diagonal(model)
    fim.sums["0.weight"].zero_()
    plan = nm.plan_pruning(model, fim, 0.5, parameters="0.weight")
    sizes = model[0].weight.detach().abs()
    assert float(sizes[plan.masks["0.weight"]].min()) > float(sizes[~plan.masks["0.weight"]].max())
    assert plan.loss_increase == 0


@pytest.mark.parametrize(("keep", "of"), [(2, 4), (1, 2), (0, 4), (1, 4)])
def test_patterns(keep: int, of: int) -> None:
    model, fim = images_network()
    plan = nm.plan_pruning(model, fim, structure=f"{keep}:{of}")
    found = saliencies(model, fim)
    for name, mask in plan.masks.items():
        inputs = mask.movedim(1, -1).reshape(-1, of)
        assert (inputs.sum(1) == keep).all()
        for scores, kept in zip(found[name].movedim(1, -1).reshape(-1, of), inputs, strict=True):
            assert sorted(scores[kept].tolist()) == sorted(scores.tolist())[of - keep :]
    assert plan.sparsity == 1 - keep / of


def test_rows_go_with_their_bias() -> None:
    model, fim = images_network()
    plan = nm.plan_pruning(model, fim, 0.5, structure="rows", parameters=["0.weight", "2.weight"])
    found, scores = saliencies(model, fim), []
    for name in ("0.weight", "2.weight"):
        rows = plan.masks[name].flatten(1)
        assert (rows.all(1) | ~rows.any(1)).all()
        assert torch.equal(plan.masks[name.replace("weight", "bias")], rows.any(1))
        assert rows.any()
        scores += [(float(s.mean()), bool(kept[0])) for s, kept in zip(found[name].flatten(1), rows, strict=True)]
    assert max(score for score, kept in scores if not kept) <= sorted(score for score, _ in scores)[-2]
    pruned = plan.apply(copy.deepcopy(model))
    hidden = pruned[1](pruned[0](torch.randn(2, 4, 4, 4, dtype=torch.float64)))  # type: ignore[index]
    assert not hidden[:, ~plan.masks["0.bias"]].any()
    same = nm.plan_pruning(model, fim, 0.5, structure="rows", parameters=["0.*", "2.*"])
    assert all(torch.equal(mask, plan.masks[name]) for name, mask in same.masks.items())
    everything = nm.plan_pruning(model, fim, 0.99, structure="rows", parameters=["0.weight", "2.weight"])
    assert all(mask.any() for mask in everything.masks.values())


def test_heads_of_a_model_of_transformers() -> None:
    model = bert()
    fim = nm.fisher_diagonal(model, tokens())
    plan = nm.plan_pruning(model, fim, 0.5, structure="heads")
    assert len(plan.masks) == 2
    for name, mask in plan.masks.items():
        heads = mask.view(16, 4, 4).transpose(0, 1).flatten(1)
        assert (heads.all(1) | ~heads.any(1)).all()
        assert name.endswith("attention.output.dense.weight")
    assert sum(int(mask.sum()) for mask in plan.masks.values()) == 256
    plan.apply(model)
    model(**tokens()[0])
    own = nn.Module()
    own.attention = nn.MultiheadAttention(8, 2, batch_first=True)
    own.forward = lambda x: own.attention(x, x, x)[0].mean(1)  # type: ignore[method-assign]
    fim = nm.fisher_diagonal(own, [torch.randn(4, 3, 8)], nm.Exact())
    (mask,) = nm.plan_pruning(own, fim, 0.5, structure="heads").masks.values()
    assert int(mask.sum()) == 32


def test_transposed_weights() -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(6, 4)  # [in, out]
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 2))
    moved(model, 0.5)
    fim = nm.fisher_diagonal(model, [torch.randn(5, 4)], nm.Exact())
    mask = nm.plan_pruning(model, fim, structure="2:4", parameters="0.weight").masks["0.weight"]
    assert (mask.sum(0) == 2).all()
    mask = nm.plan_pruning(model, fim, 0.5, structure="rows", parameters="0.weight").masks["0.weight"]
    assert sorted(mask.sum(0).tolist()) == [0, 0, 0, 4, 4, 4]


def test_the_predicted_loss_is_that_of_a_small_change() -> None:
    """Shrinking the pruned entries by a small factor changes the KL divergence by factor² times a sum with F."""
    model = network(6)
    data = [torch.randn(40, 3, dtype=torch.float64)]
    fim = nm.fisher_diagonal(model, data, nm.Exact())
    name, index = "2.weight", (1, 3)
    loss = 0.5 * float(fim[name][index]) * float(model[2].weight[index].detach()) ** 2
    before = model(data[0]).log_softmax(1)
    with torch.no_grad():
        model[2].weight[index] *= 1 - 1e-3
        after = model(data[0]).log_softmax(1)
    divergence = float((before.exp() * (before - after)).sum(1).mean().detach())
    assert divergence == pytest.approx(loss * 1e-6, rel=0.01)


def test_masks_are_those_of_torch_and_nothing_changes_before() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    plan = nm.plan_pruning(model, diagonal(model), 0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert plan.apply(model) is model
    assert prune.is_pruned(model)
    assert torch.equal(model[0].weight != 0, plan.masks["0.weight"])
    other = plan.apply(network(), permanent=True)
    assert not prune.is_pruned(other)
    assert torch.equal(other[0].weight, model[0].weight)  # type: ignore[index]
    text = str(plan)
    assert "0.weight" in text
    assert "50.0 %" in text
    wrapped = nn.Sequential()
    wrapped.add_module("module", network())
    assert prune.is_pruned(plan.apply(wrapped))


def test_bad_input() -> None:
    model = network()
    fim = diagonal(model)
    for sparsity in (-0.1, 1.0, 50, float("nan")):
        with pytest.raises(ValueError, match="`sparsity`"):
            nm.plan_pruning(model, fim, sparsity)
    with pytest.raises(ValueError, match=r"0\.weight has shape \[5, 3\] instead of \[4, 3\]"):
        nm.plan_pruning(network(5), fim)
    with pytest.raises(ValueError, match="'head.*'"):  # noqa: RUF043
        nm.plan_pruning(model, fim, parameters="head.*")
    with pytest.raises(ValueError, match="weights of two dimensions or more"):
        nm.plan_pruning(model, fim.filter("*.bias"))
    with pytest.raises(ValueError, match=r"groups of 4, got 0\.weight of shape \[4, 3\]"):
        nm.plan_pruning(model, fim, structure="2:4")
    with pytest.raises(ValueError, match="`structure`"):
        nm.plan_pruning(model, fim, structure="4:4")
    with pytest.raises(ValueError, match="`structure` must be 'entries', 'rows', 'heads' or '2:4'"):
        nm.plan_pruning(model, fim, structure="blocks")
    with pytest.raises(ValueError, match="given for structure='rows'"):
        nm.plan_pruning(model, fim, structure="rows")
    with pytest.raises(ValueError, match="a selection with matrices"):
        nm.plan_pruning(model, fim, structure="rows", parameters="*.bias")
    with pytest.raises(ValueError, match="attention is found by name, got Sequential"):
        nm.plan_pruning(model, fim, structure="heads")
    plan = nm.plan_pruning(model, fim)
    plan.apply(model)
    with pytest.raises(ValueError, match=r"`model` must be one with the parameters of the plan.*Is it pruned already"):
        plan.apply(model)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0\.weight, which is also 2\.weight"):
        nm.plan_pruning(tied, diagonal(tied))
