"""Labels of causal language models: shifted by one, as the models themselves do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.problem.model import shifts_labels
from tests.language.families import (
    CAUSAL,
    VOCABULARY,
    assert_same,
    bart_decoder,
    bert_masked,
    bert_tokens,
    gpt2,
    llama,
    make,
    own_score_squares,
    reference,
    t5,
    tokens,
    transformers,
)

pytestmark = pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")


def labels_of(ids: Tensor, *prompts: int) -> Tensor:
    """Labels as transformers takes them, with prompts of some lengths masked."""
    labels = ids.clone()
    for label, prompt in zip(labels, prompts, strict=True):
        label[:prompt] = -100
    return labels


def singles(ids: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": a[None], "labels": b[None]} for a, b in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("family", CAUSAL)
def test_the_empirical_score_is_the_gradient_of_the_models_own_loss(family: str) -> None:
    model, ids = CAUSAL[family](), tokens(3, 6)
    labels = labels_of(ids, 0, 2, 4)
    expected = own_score_squares(model, singles(ids, labels))
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": labels}], nm.Empirical(), reduction="sum")
    assert_same(found, expected)
    assert (found.count, found.positions, found.provenance.shift_labels) == (3, 5 + 4 + 2, True)
    wrong = nm.fisher_diagonal(
        model, [{"input_ids": ids, "labels": labels}], nm.Empirical(), reduction="sum", shift_labels=False
    )
    with pytest.raises(AssertionError):
        assert_same(wrong, expected)


@pytest.mark.parametrize("make_model", [t5, bert_masked, bert_tokens, bart_decoder])
def test_other_models_take_labels_where_they_stand(make_model: Any) -> None:
    model, ids = make_model(), tokens(2, 4)
    assert not shifts_labels(model)
    labels = labels_of(tokens(2, 4, seed=1) % 3, 0, 2)
    expected = own_score_squares_one_by_one(model, ids, labels)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": labels}], nm.Empirical(), reduction="sum")
    assert_same(found, expected)
    assert (found.positions, found.provenance.shift_labels) == (6, False)


def own_score_squares_one_by_one(model: nn.Module, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """As `own_score_squares`, for losses that are means over labels."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for a, b in zip(ids, labels, strict=True):
        loss = model(input_ids=a[None], labels=b[None]).loss * (b != -100).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for name, gradient in zip(sums, gradients, strict=True):
            sums[name] += 0 if gradient is None else gradient.square()
    return sums


def test_all_results_count_the_same_positions() -> None:
    """A prompt is left out by every estimator and every kind of result, not by Empirical alone."""
    model, ids = gpt2(), tokens(2, 5)
    chosen = ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    data = [{"input_ids": ids, "labels": labels_of(ids, 3, 0)}]
    counted = [[2, 3], [0, 1, 2, 3]]  # positions whose next token is no prompt
    expected = reference(model, singles_without_labels(ids), lambda n: counted[n], chosen)
    exact = nm.fisher_diagonal(model, data, nm.Exact(), parameters=chosen, reduction="sum")
    assert_same(exact, expected)
    options: dict[str, Any] = {"parameters": chosen, "reduction": "sum"}
    flat = torch.cat([value.flatten() for value in expected.values()])
    matrix = nm.fisher_matrix(model, data, **options)
    assert_same(matrix.diagonal(), expected)
    operator = nm.fisher_operator(model, data, **options)
    products = operator.matmat(torch.eye(len(flat), dtype=torch.float64))
    torch.testing.assert_close(products.diagonal(), flat, rtol=1e-6, atol=1e-12)
    factors = nm.fisher_factors(model, data, nm.Exact(), granularity="sample", dtype=torch.float64, **options)
    assert_same(factors.diagonal(), expected)
    trace = nm.fisher_trace(model, data, nm.Exact(), **options)
    assert trace.sum == pytest.approx(float(flat.sum()))
    bounds = nm.fisher_bounds(model, data, parameters=chosen, reduction="sum")
    assert bounds.positions == exact.positions == 6
    random = nm.fisher_diagonal(model, data, parameters=chosen, granularity="batch")
    assert random.positions == nm.check(model, data, parameters=chosen).exact.positions == 6


def singles_without_labels(ids: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row[None]} for row in ids]


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
def test_padding_on_either_side_changes_nothing(family: str, side: str, labelled: bool) -> None:
    """Without labels, too: a position counts if it and the next one hold tokens."""
    model, lengths = CAUSAL[family](), (3, 5)
    ids = tokens(2, 5)
    chosen = [name for name, _ in model.named_parameters() if "norm" in name or "ln_" in name]
    alone = [{"input_ids": row[None, :n]} for row, n in zip(ids, lengths, strict=True)]
    expected = reference(model, alone, lambda i: range(lengths[i] - 1), chosen)
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        place = slice(5 - n, None) if side == "left" else slice(n)
        padded[i, place], mask[i, place] = ids[i, :n], 1
    batch = {"input_ids": padded, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    batch |= {"labels": padded.masked_fill(mask == 0, -100)} if labelled else {}
    found = nm.fisher_diagonal(model, [batch], nm.Exact(), parameters=chosen, reduction="sum")
    assert_same(found, expected)
    assert found.positions == 2 + 4


def test_left_padding_against_the_models_own_loss() -> None:
    """The model's own loss has one term more: the first token, predicted from padding; unless its label is ignored."""
    model, ids = llama(), tokens(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    found = nm.fisher_diagonal(model, [batch], nm.Empirical(), reduction="sum")
    without_first = {**batch, "labels": labels_of(labels, 3)}
    assert_same(found, own_score_squares(model, [without_first]))


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
def test_packed_sequences_are_those_of_single_ones(labelled: bool) -> None:
    """Documents of three, one and four tokens in a row: the last token of one does not predict the next document."""
    model, ids = llama(), tokens(1, 8)
    position_ids = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])
    labels = ids.masked_fill(position_ids == 0, -100)  # as DataCollatorWithFlattening makes them
    batch = {"input_ids": ids, "position_ids": position_ids} | ({"labels": labels} if labelled else {})
    documents = [{"input_ids": part} for part in ids.split([3, 1, 4], 1)]
    expected = reference(model, documents, lambda i: range([3, 1, 4][i] - 1))
    found = nm.fisher_diagonal(model, [batch], nm.Exact(), reduction="sum")
    assert_same(found, expected)
    assert (found.count, found.positions) == (1, 5)
    if labelled:
        own = own_score_squares(model, [{**batch, "use_cache": False}])  # as in training
        assert_same(nm.fisher_diagonal(model, [batch], nm.Empirical(), reduction="sum"), own)


def test_wrapped_and_derived_models_are_recognised() -> None:
    model = gpt2()
    assert shifts_labels(model)
    assert shifts_labels(torch.compile(model))  # type: ignore[arg-type]
    assert shifts_labels(nn.DataParallel(model))
    peft = pytest.importorskip("peft", reason="needs neuromanifold[peft]")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    assert shifts_labels(torch.compile(peft.get_peft_model(model, lora)))
    derived = type("Mine", (transformers.LlamaForCausalLM,), {})
    assert shifts_labels(derived(llama().config))
    assert not shifts_labels(make("GPT2ForTokenClassification", "GPT2Config", gpt2().config.to_dict()))
    assert not shifts_labels(nn.Linear(2, 2))


def test_a_model_that_shifts_labels_otherwise_is_noticed() -> None:
    """What the class does not tell is asked of the model's own loss, on the first batch."""
    model, ids = bart_decoder(), tokens(2, 5)
    data = [{"input_ids": ids, "labels": ids}]
    with warnings.catch_warnings():
        warnings.simplefilter("error", nm.SuspiciousInputWarning)
        nm.fisher_diagonal(model, data, parameters="*norm*")
    model.config.decoder_start_token_id = None  # now it looks like one that shifts
    with pytest.warns(nm.SuspiciousInputWarning, match="own loss compares label t with .* Pass shift_labels=False"):
        nm.fisher_diagonal(model, data, parameters="*norm*")
    with warnings.catch_warnings():
        warnings.simplefilter("error", nm.SuspiciousInputWarning)
        nm.fisher_diagonal(model, data, parameters="*norm*", shift_labels=False)


class NextToken(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).tanh())  # type: ignore[no-any-return]


def test_a_model_of_ones_own_is_told_to_shift() -> None:
    torch.manual_seed(0)
    model, ids = NextToken().double(), tokens(3, 5)
    shifted = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    expected = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": shifted}], nm.Empirical())
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": ids}], nm.Empirical(), shift_labels=True)
    assert_same(found, dict(expected))
    assert nm.fisher_diagonal(model, [ids]).positions == 15
    assert nm.fisher_diagonal(model, [ids], shift_labels=True).positions == 12
    with pytest.raises(ValueError, match="`shift_labels` must be 'auto'"):
        nm.fisher_diagonal(model, [ids], shift_labels="yes")  # type: ignore[arg-type]


def test_results_with_and_without_shift_do_not_add(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, first, second = NextToken(), tokens(3, 5), tokens(3, 5, seed=1)
    a = nm.fisher_diagonal(model, [first], shift_labels=True)
    a.save(tmp_path / "a.safetensors")
    a = nm.load(tmp_path / "a.safetensors")
    assert a.provenance.shift_labels
    assert "position t predicts token t + 1" in str(a)
    b = nm.fisher_diagonal(model, [second], seed=1)
    assert "predicts" not in str(b)
    with pytest.raises(ValueError, match="shift_labels"):
        a + b


def test_labels_that_are_shifted_already_are_noticed() -> None:
    """The model's own loss would shift them once more, too."""
    model, ids = gpt2(), tokens(2, 5)
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    with pytest.warns(nm.SuspiciousInputWarning, match="shifted already: label t is token"):
        nm.fisher_diagonal(model, [{"input_ids": ids, "labels": shifted}], parameters="*ln_f*")
    with pytest.warns(nm.SuspiciousInputWarning, match="predicts the next token, pass shift_labels=True"):
        nm.fisher_diagonal(NextToken(), [(ids, ids)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", nm.SuspiciousInputWarning)
        nm.fisher_diagonal(NextToken(), [(ids, ids)], shift_labels=True)
        nm.fisher_diagonal(NextToken(), [(ids, ids)], shift_labels=False)


def test_what_has_no_next_position_cannot_be_shifted() -> None:
    with pytest.raises(ValueError, match="`shift_labels` must be False for logits that are not"):
        nm.fisher_diagonal(nn.Linear(3, 4), [torch.randn(2, 3)], shift_labels=True)
    batch = {"input_ids": tokens(2, 5), "labels": tokens(2, 5), "logits_to_keep": 3}
    with pytest.raises(ValueError, match=r"the last positions alone .logits_to_keep., give the labels of these"):
        nm.fisher_diagonal(llama(), [batch])


def test_a_sequence_without_labels_does_not_count() -> None:
    model, ids = llama(), tokens(3, 4)
    labels = labels_of(ids, 0, 4, 0)
    found = nm.fisher_diagonal(model, [{"input_ids": ids, "labels": labels}], nm.Exact(), reduction="sum")
    assert_same(found, reference(model, singles_without_labels(ids[[0, 2]]), lambda _: range(3)))
    assert found.count == 2
