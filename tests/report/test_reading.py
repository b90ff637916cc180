"""The sentences say what the numbers say, and what the numbers are."""

import re
from dataclasses import replace

import pytest
import torch

import neuromanifold as nm
from neuromanifold.report.formats import brief, percent
from neuromanifold.report.reading import comparison_sentence, reading
from neuromanifold.results import Comparison
from neuromanifold.results.summary import summarize
from tests.report.results import result, transformer
from tests.run.test_contract import MODEL, batches


def said(fim: nm.DiagonalFisher, **how: bool) -> str:
    return " ".join(reading(summarize(fim), **how)).replace("\u00a0", " ")


def test_where_the_trace_sits_and_what_is_zero() -> None:
    sums = transformer()
    text = said(result(sums))
    total = sum(float(value.sum()) for value in sums.values())
    head = float(sums["classifier.weight"].sum() + sums["classifier.bias"].sum()) / total
    assert f"The head `classifier` has {percent(head)} of the trace".replace("\u00a0", " ") in text
    assert "40 of 50 rows of `net.embed.word_embeddings.weight`, tokens that the data never use" in text
    assert "`net.layer.1.key.bias` is zero throughout" in text
    assert "known to ± 10 %" in text


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (nm.Exact(), "The exact Fisher diagonal"),
        (nm.Hutchinson(deflate=0), "An unbiased estimate"),
        (nm.MonteCarlo(), "An unbiased estimate"),
        (nm.Hutchinson(envelope=nm.Upper()), "An upper bound of the Fisher diagonal, estimated without bias"),
        (nm.Exact(envelope=nm.Lower(rank=1)), "A lower bound of the Fisher diagonal, computed exactly"),
        (nm.Empirical(), "A biased estimate of the Fisher diagonal: given labels instead of the model's"),
        (nm.SquaredBatchGradient(), "Not a Fisher estimate"),
    ],
    ids=str,
)
def test_what_the_numbers_are_is_said_first(estimator: nm.Estimator, words: str) -> None:
    fim = nm.fisher_diagonal(MODEL, batches(16), estimator)
    sentences = reading(summarize(fim))
    assert sentences[0].startswith(words)
    text = " ".join(sentences)
    assert ("no error bars" in text) == (fim.relative_error == 0)
    biased = "bound" in words or "biased" in words.split() or "Not a" in words
    assert ("the bias" in text) == (biased and "Not a" not in words) or "Not a" in words
    assert ("with other data" in text) == (not biased)


def test_an_estimate_without_noise_is_exact() -> None:
    assert "had no noise here, so it is exact" in said(result(transformer(), noise=0))


def test_how_parameters_were_squared() -> None:
    sums = transformer()
    assert "squared per batch" not in said(result(sums))
    text = said(result(sums, granularities={"classifier.bias": "batch"}))
    assert "`classifier.bias` was squared per batch, with more noise: no per-sample rule applies" in text
    assert "The gradients of whole batches were squared" in said(
        result(sums, granularities=dict.fromkeys(sums, "batch"))
    )
    slow = dict.fromkeys(list(sums)[:5], "sample, one by one")
    assert "and 2 more took one backward pass for each sample" in said(result(sums, granularities=slow))


def test_nothing_at_all_and_all_zero() -> None:
    assert "no entries" in said(result({}))
    assert "Every entry is exactly zero" in said(result({"a.weight": torch.zeros(3)}))
    one = said(result({"a.weight": torch.ones(1)}))
    assert "single largest entry holds" in one
    assert "No entry is exactly zero" in one
    assert "The run stopped after 3 batches." in said(result({"a": torch.ones(1)}, stopped="stopped after 3 batches"))
    unmet = said(result({"a": torch.ones(1)}, stopped="rtol 0.05 not reached: relative standard error 0.1"))
    assert "The accuracy asked for was not reached: rtol 0.05 not reached" in unmet


def test_beside_another_result_only_what_may_differ_is_said() -> None:
    whole, short = said(result(transformer())), said(result(transformer()), beside=True)
    assert "Half of the trace" in whole
    assert "Half of the trace" not in short
    assert "known to" in short


def test_comparisons() -> None:
    found = Comparison(0.3, 0.25, 0.1, 2.0, 0.5, 0.9, entries=1200, positive=9)
    text = comparison_sentence("b", "a", found).replace("\u00a0", " ")
    assert "`b` has 2 times the trace of `a`; a positive entry differs by 25 % on average" in text
    assert "no parameter in common" in comparison_sentence("b", "a", None)
    assert "is zero on all" in comparison_sentence("b", "a", replace(found, positive=0))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1e-7, "< 0.01 %"),
        (0.00034, "0.034 %"),
        (0.0345, "3.5 %"),
        (0.0996, "10 %"),
        (0.62, "62 %"),
        (0.991, "99.1 %"),
        (0.99999, "> 99.9 %"),
        (1.0, "100 %"),
        (1.5, "150 %"),
        (float("nan"), "–"),
    ],
)
def test_percentages_never_round_to_nothing_or_everything(share: float, text: str) -> None:
    assert percent(share).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    "estimator",
    [nm.Hutchinson(deflate=0), nm.Hutchinson(probes=3), nm.Exact(envelope=nm.Lower(rank=2)), nm.Empirical()],
)
def test_an_estimator_is_shown_as_it_is_written(estimator: nm.Estimator) -> None:
    short = brief(repr(estimator))
    assert eval(short, {**vars(nm)}) == estimator
    assert len(short) <= len(repr(estimator))
    assert not re.search(r"orthogonal|noise=", short)


def test_a_foreign_estimator_is_shown_as_it_is() -> None:
    assert brief("Mine(a=1)") == "Mine(a=1)"
    assert brief("something else") == "something else"
