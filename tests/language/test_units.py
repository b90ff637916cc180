"""Sequences and tokens: what is counted, what the result is divided by, and what it says."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.language.families import VOCABULARY, gpt2, tokens


def ragged() -> dict[str, Tensor]:
    ids = tokens(3, 6)
    mask = (torch.arange(6) < torch.tensor([[6], [2], [4]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_means_are_per_sequence_and_per_token(tmp_path: Path) -> None:
    fim = nm.fisher_diagonal(gpt2(), [ragged()])
    assert (fim.count, fim.positions) == (3, 5 + 1 + 3)
    assert (fim.unit, fim.sum.unit, fim.per_token.unit) == ("per sequence", "summed over sequences", "per token")
    name = "transformer.wte.weight"
    torch.testing.assert_close(fim.sum[name], 3 * fim[name])
    torch.testing.assert_close(fim.sum[name], 9 * fim.per_token[name])
    torch.testing.assert_close(fim.sum.stderr[name], 9 * fim.per_token.stderr[name])
    upper = fim.interval()[1][name]
    torch.testing.assert_close(3 * upper, 9 * fim.per_token.interval()[1][name])
    assert float(fim.per_token.trace) == pytest.approx(float(fim.trace) / 3)
    per_token = fim.per_token
    per_token.save(tmp_path / "fim.safetensors")
    again = nm.load(tmp_path / "fim.safetensors")
    assert again.reduction == "token"
    torch.testing.assert_close(again[name], per_token[name])
    text = str(again)
    assert text.startswith("DiagonalFisher (per token)")
    assert "3 sequences, 9 tokens" in text
    page = again.report(tmp_path / "fim.html").read_text()
    assert "The diagonal of the Fisher information, per token" in page
    assert "9 tokens" in page
    with pytest.raises(ValueError, match=r"Use \.mean, \.sum or \.per_token"):
        fim.compare(per_token)


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
def test_traces_are_per_token_too(tmp_path: Path) -> None:
    model, data = gpt2(), [ragged()]
    trace = nm.fisher_trace(model, data, nm.Exact(), reduction="token")
    expected = nm.fisher_diagonal(model, data, nm.Exact()).per_token.trace
    assert trace.value == pytest.approx(expected.value)
    assert "per token; 3 sequences, 9 tokens" in str(trace)
    trace.save(tmp_path / "trace.json")
    assert nm.load(tmp_path / "trace.json") == trace
    with pytest.raises(ValueError, match=r"'mean' .per sample., 'token' .per position. or 'sum'"):
        nm.fisher_trace(model, data, reduction="tokens")
    with pytest.raises(ValueError, match=r"'mean' .per sample. or 'sum'"):
        nm.fisher_matrix(model, data, reduction="token")


def test_parts_of_different_lengths_add_by_tokens() -> None:
    """The mean per token of all data is no mean of the parts' means."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Linear(3, 5)).double()
    first, second = tokens(4, 3), tokens(2, 8, seed=1)
    whole = nm.fisher_diagonal(model, [first, second], nm.Exact()).per_token
    parts = sum(nm.fisher_diagonal(model, [part], nm.Exact()).per_token for part in (first, second))
    assert (parts.count, parts.positions, parts.unit) == (6, 28, "per token")
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name])


def test_samples_with_one_output_and_images_keep_their_names() -> None:
    flat = nm.fisher_diagonal(nn.Linear(3, 4), [torch.randn(5, 3)])
    assert (flat.unit, flat.per_token.unit, flat.seen) == ("per sample", "per position", "5 samples")
    image = nm.fisher_diagonal(nn.Conv2d(1, 3, 1), [torch.randn(2, 1, 4, 4)], class_dim=1)
    assert (image.unit, image.seen) == ("per sample", "2 samples, 32 positions")
