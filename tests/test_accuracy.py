"""benchmarks/accuracy.py on a few digits: it runs, keeps what it finds, and its errors are those of the library."""

import importlib
import json
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from docs.figures.accuracy import error_cost

import neuromanifold as nm
from neuromanifold.experiments import digits

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    monkeypatch.setattr(digits, "train_digits", partial(digits.train_digits, epochs=1))
    return importlib.import_module("accuracy")


def test_the_digits(accuracy: ModuleType, tmp_path: Path) -> None:
    numbers = {"--samples": 32, "--batch-size": 16, "--seeds": 1, "--repeats": 1, "--timed-batches": 1}
    accuracy.main(["digits", *(f"{flag}={value}" for flag, value in numbers.items())])
    result = json.loads((tmp_path / "accuracy-digits.json").read_text())
    assert result["reference_check"] < 1e-5
    assert result["entries"] == {"rest": 9930, "all": 9930}
    assert all(row["time"] > 0 and row["by_batches"] == [] for row in result["rows"])
    text = (tmp_path / "accuracy-digits.md").read_text()
    assert text.count("holds:") + text.count("HOLD:") == len(result["statements"]) == 2
    network = error_cost(tmp_path / "accuracy-digits.json")
    assert [point.cost for point in network.curve] == [1, 2, 4, 8, 9]
    assert network.curve[-1].error < 1e-5


def test_errors_are_those_of_compare(accuracy: ModuleType) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    data = [torch.randint(0, 7, (5, 2))]
    exact, estimate = (nm.fisher_diagonal(model, data, one) for one in (nm.Exact(), nm.MonteCarlo()))
    found, theirs = accuracy.errors(estimate, exact), estimate.sum.compare(exact.sum)
    assert found["relmae"] == pytest.approx(theirs.relmae)
    assert found["relmae_positive"] == pytest.approx(theirs.relmae_positive) != found["relmae"]
    assert found["scale"] == pytest.approx(theirs.mean_ratio)
    assert accuracy.groups(model) == {
        "embeddings": {"0.weight"},
        "rest": {"2.weight", "2.bias"},
        "all": {"0.weight", "2.weight", "2.bias"},
    }


def test_an_export_gives_back_what_was_packed(accuracy: ModuleType) -> None:
    del accuracy  # only for the path
    tasks = importlib.import_module("tasks")
    words, few = torch.randn(20, 3), torch.randn(5)[torch.randint(0, 5, (6, 4))]
    weights = {"a.word_embeddings.weight": words, "few": few, "many": torch.randn(30, 40), "count": torch.tensor(7)}
    packed = tasks._packed(weights, {"input_ids": torch.tensor([[3, 3], [11, 0]])})
    assert packed["few:codes"].dtype == torch.uint8
    again = tasks._unpacked(packed, {name: value.shape for name, value in weights.items()})
    assert all(torch.equal(again[name], weights[name]) for name in ("few", "many", "count"))
    kept = again["a.word_embeddings.weight"]
    assert torch.equal(kept[[0, 3, 11]], words[[0, 3, 11]])
    assert kept.count_nonzero() == 9
