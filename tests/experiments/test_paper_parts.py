"""The parts of the paper's experiments: tasks, columns, components, times, comparisons of large results."""

import json
import math
from pathlib import Path

import pytest
import torch

import neuromanifold as nm
from neuromanifold.experiments.paper import TASKS, Folder, PaperSettings
from neuromanifold.experiments.paper.columns import BASELINE, COLUMNS, EXACT, OURS, PAPER, curve
from neuromanifold.experiments.paper.measure import parameter_groups
from neuromanifold.experiments.paper.sources import Prepared
from neuromanifold.experiments.paper.speed import TIMED, _seconds, measure_speed
from neuromanifold.experiments.paper.table import as_csv, as_latex, as_text, read_numbers
from neuromanifold.hf import LoadedData, LoadedModel
from neuromanifold.results import comparison
from neuromanifold.results.comparison import compare
from neuromanifold.results.naming import paper_components


def test_the_tasks_are_the_papers() -> None:
    assert [(task.row, task.classes, task.fine_tuned) for task in TASKS.values()] == [
        ("SST-2", 2, True),
        ("DBpedia", 14, False),
        ("MNLI", 3, True),
        ("CIFAR-100 (R)", 100, False),
        ("CIFAR-100 (E)", 100, False),
        ("SpeechCommands", 12, False),
    ]
    for task in TASKS.values():
        assert set(task.printed) == {column.key for column in PAPER} - {"empirical"}
        assert task.printed[BASELINE.key].speed == 1
        assert all(cell.relmae > 0 for cell in task.printed.values())
        assert not task.class_names or sorted(task.class_names.values()) == list(range(task.classes))


def test_columns_are_squared_as_their_name_says() -> None:
    keys = [column.key for column in COLUMNS]
    assert len(set(keys)) == len(keys) == 9
    assert [column.per for column in PAPER if column.key != "empirical"] == ["batch"] * 5
    assert [column.per for column in (EXACT, *OURS)] == ["sample"] * 4
    assert all(("per_batch" in column.key) == (column.per == "batch") for column in COLUMNS if column != BASELINE)


@pytest.mark.parametrize(
    ("classes", "probes"), [(2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (14, [1, 2, 4, 8, 13]), (17, [1, 2, 4, 8, 16])]
)
def test_the_curve_doubles_until_nothing_random_is_left(classes: int, probes: list[int]) -> None:
    assert [column.estimator.probes for column in curve(classes)] == probes  # type: ignore[attr-defined]
    assert curve(classes)[0] == COLUMNS[-1]
    assert [column.estimator.probes for column in curve(classes, most=4)] == [m for m in probes if m <= 4]  # type: ignore[attr-defined]


NAMES = {
    "DistilBERT": (
        ["d.embeddings.word.weight", "d.embeddings.LayerNorm.bias", "d.transformer.layer.0.q.weight",
         "d.transformer.layer.0.k.bias", "d.transformer.layer.1.q.weight", "pre_classifier.weight", "classifier.bias"],
        ["embedding", "embedding", "layer 0", "layer 0", "layer 1", "head", "head"],
    ),
    "ResNet, whose head has a number": (
        ["r.embedder.weight", "r.stages.0.layers.0.layer.0.weight", "r.stages.0.layers.1.layer.0.weight",
         "r.stages.1.layers.0.layer.0.weight", "classifier.1.weight"],
        ["embedding", "stages 0", "stages 0", "stages 1", "head"],
    ),
    "two containers": (
        ["w.mask", "w.conv_layers.0.weight", "w.conv_layers.1.weight", "w.projection.weight", "w.layers.0.weight",
         "w.layers.1.weight", "classifier.weight"],
        ["embedding", "conv_layers 0", "conv_layers 1", "w projection", "layers 0", "layers 1", "head"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("network", NAMES)
def test_components_are_embedding_blocks_and_head(network: str) -> None:
    names, expected = NAMES[network]
    found = paper_components(names)
    assert [next(label for label, group in found.items() if name in group) for name in names] == expected
    assert [name for group in found.values() for name in group] == names


def test_a_network_without_blocks_has_its_modules_as_components() -> None:
    assert list(paper_components(["0.weight", "2.weight", "head.bias"])) == ["0", "2", "head"]


def test_embeddings_stand_apart_also_where_they_are_tied() -> None:
    model = torch.nn.Module()
    model.words, model.out = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
    model.free = torch.nn.Parameter(torch.ones(2))
    model.fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert parameter_groups(model) == {
        "all": ["free", "words.weight", "out.weight", "out.bias"],
        "rest": ["free", "out.weight", "out.bias"],
        "embeddings": ["words.weight"],
    }
    model.out.weight = model.words.weight
    assert parameter_groups(model)["embeddings"] == ["words.weight"]
    assert set(parameter_groups(torch.nn.Linear(2, 2))) == {"all", "rest"}


@pytest.mark.parametrize("ranked", [7, 10, 10**6])
def test_comparing_tensor_by_tensor_is_comparing_all_at_once(monkeypatch: pytest.MonkeyPatch, ranked: int) -> None:
    monkeypatch.setattr(comparison, "_RANKED", ranked)
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "empty": (0,), "b": (1,), "c": (5, 2, 2), "d": ()}
    b = {name: torch.randn(shape, generator=generator).relu() for name, shape in shapes.items()}
    a = {name: value * (1 + torch.rand(value.shape, generator=generator)) for name, value in b.items()}
    x, y = (torch.cat([one[name].flatten().double() for name in shapes]) for one in (a, b))
    found, relative = compare(a, b, 1e-12), (x - y).abs() / (y + 1e-12)
    assert found.relmae == pytest.approx(relative.mean().item(), rel=1e-12)
    assert found.relmae_positive == pytest.approx(relative[y > 0].mean().item(), rel=1e-12)
    assert found.mae == pytest.approx((x - y).abs().mean().item(), rel=1e-12)
    assert found.mean_ratio == pytest.approx((x.sum() / y.sum()).item(), rel=1e-12)
    assert found.cosine == pytest.approx(torch.nn.functional.cosine_similarity(x, y, dim=0).item(), rel=1e-12)
    assert (found.entries, found.positive) == (34, int((y > 0).sum()))
    step = max(1, 34 // ranked)
    ranks = torch.stack([one[::step].argsort().argsort().double() for one in (x + 1e-9 * torch.arange(34), y)])
    if bool((y[::step] > 0).all()):  # no ties
        assert found.rank_correlation == pytest.approx(torch.corrcoef(ranks)[0, 1].item())
    monkeypatch.setattr(comparison, "_RANKED", 10**6)
    whole = compare({"all": x[::step]}, {"all": y[::step]}, 1e-12)
    assert found.rank_correlation == pytest.approx(whole.rank_correlation, rel=1e-12)


def test_nothing_to_compare_gives_nan() -> None:
    found = compare({"a": torch.zeros(0)}, {"a": torch.zeros(0)}, 1e-12)
    assert math.isnan(found.relmae)
    assert found.entries == 0


# ---------------------------------------------------------------------------------------------------------- times


class Slow(torch.nn.Module):
    """Notes how large its batches are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(3, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x)


def prepared() -> Prepared:
    model = LoadedModel(Slow(), None, None, 4, {}, nm.Categorical, "slow")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    data = LoadedData((0, 1, 2, 3), 2, lambda rows: {"x": x[rows]}, "four rows")
    return Prepared(TASKS["sst2"], model, data, False, 0, True)


def test_the_first_batches_are_not_timed() -> None:
    one, cpu = prepared(), torch.device("cpu")
    batches = [{**batch, "labels": torch.zeros(2, dtype=torch.int64)} for batch in one.batches(5)]
    assert len(_seconds(one, COLUMNS[0], batches, cpu, 1)) == 4
    assert len(_seconds(one, COLUMNS[0], batches, cpu, 3)) == 2
    assert _seconds(one, COLUMNS[0], batches[:1], cpu, 1) == []


def test_times_are_kept_and_batches_begin_anew_where_there_are_few(tmp_path: Path) -> None:
    one, folder = prepared(), Folder(tmp_path / "out", PaperSettings(batches=2, batch_size=2, device="cpu"))
    assert len(one.batches(TIMED + 1)) == TIMED + 1  # of two
    folder.claim("sst2", {"classes": 4})
    found = measure_speed(one, folder, rounds=2)
    assert set(found["seconds"]) == {column.key for column in (EXACT, *COLUMNS)}
    assert all(value > 0 for value in found["seconds"].values())
    assert set(found["batches_timed"].values()) == {2 * TIMED}
    seen = one.module.seen
    assert measure_speed(one, folder)["seconds"] == found["seconds"]
    assert one.module.seen == seen


# --------------------------------------------------------------------------------------------------------- tables


def test_tables_of_what_is_there_so_far(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out", PaperSettings())
    assert read_numbers(folder) == []
    about = {"model": "m", "data": "d", "own": False, "classes": 3, "samples": 8192, "parameters": 10}
    folder.claim("mnli", about)
    assert read_numbers(folder) == []  # the exact diagonal is not there yet

    def keep(key: str, relmae: float, rank: float = 1.0) -> None:
        errors = {"relmae": relmae, "relmae_positive": relmae, "mae": 1e-3, "mean_ratio": 1.0, "cosine": 1.0}
        errors |= {"rank_correlation": rank, "entries": 10, "positive": 9}
        numbers = {"estimator": key, "target": "unbiased", "passes": 1.0, "errors": {"all": errors}}
        folder.keep("mnli", key, "column", numbers)

    keep("exact", 0)
    keep("hutchinson", 0.123456, math.nan)
    keep("upper_per_batch", 1234.5)
    tasks = read_numbers(folder)
    text, lines, latex = as_text(tasks), as_csv(tasks).splitlines(), as_latex(tasks)
    assert "MNLI " in text
    assert "MNLI *" not in text
    assert "RelMAE, all but embeddings" not in text
    assert ["MNLI", "-", "-", "-", "1234", "-", "-", "-", "0.12", "-"] in [line.split() for line in text.splitlines()]
    assert len(lines) == 4
    assert lines[3].startswith("mnli,all,hutchinson,hutchinson,sample,unbiased,1.0,0.123456,")
    assert r"$\mathbf{0.12}$" in latex
    assert r"53.9\,($\times1.00$)" in latex
    assert json.loads(folder.file("mnli", "hutchinson.json").read_text())["errors"]["all"]["rank_correlation"] is None


def test_settings_are_checked() -> None:
    for bad in ({"batches": 0}, {"batch_size": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PaperSettings(**bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batches"):
        PaperSettings(batches=1.5)  # type: ignore[arg-type]
