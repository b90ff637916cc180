"""Error against cost: what is read from benchmarks/results, and that the picture shows it."""

import json
from pathlib import Path

import pytest
from docs.figures.accuracy import all_error_costs, error_cost, plot_error_cost

from neuromanifold.experiments.error_cost import CEILING, FLOOR, label

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def row(name: str, granularity: str, error: float, passes: int = 1, curve: bool = False, target: str = "unbiased"):
    numbers = {"rest": {"relmae": error}, "all": {"relmae": 2 * error}}
    kind = {"estimator": name, "granularity": granularity, "target": target, "curve": curve}
    return {**kind, "passes": passes, "time": 1.5 * passes, "errors": numbers}


def write(folder: Path, task: str, classes: int, embeddings: bool = False) -> Path:
    rows = [
        row("Hutchinson(deflate=0)", "batch", 0.3),
        row("Empirical()", "sample", 123.0, target="biased (given labels)"),
    ]
    probes = [m for m in (1, 2, 4) if m < classes - 1] + [classes - 1]
    rows += [row(f"Hutchinson(probes={m})", "sample", 0.1 / m, m, curve=True) for m in probes]
    rows[-1]["errors"]["rest"]["relmae"] = 0.0
    if embeddings:
        for one in rows:
            one["errors"]["embeddings"] = {"relmae": 0.5}
    groups = dict.fromkeys(rows[0]["errors"], 10)
    result = {"task": task, "classes": classes, "samples": 8, "batch_size": 4, "entries": groups, "rows": rows}
    path = folder / f"accuracy-{task}.json"
    path.write_text(json.dumps(result))
    return path


def test_what_is_read(tmp_path: Path) -> None:
    network = error_cost(write(tmp_path, "six", 6))
    assert (network.task, network.classes, network.samples, network.batch_size) == ("six", 6, 8, 4)
    assert [point.cost for point in network.curve] == [1, 2, 4, 5]
    assert [point.error for point in network.curve] == [0.1, 0.05, 0.025, 0.0]
    assert network.paper.error == 0.3
    assert [(point.per_sample, point.unbiased) for point in network.points] == [(False, True), (True, False)]
    assert label(network.points[1]) == "Empirical() per sample, biased"
    assert [point.cost for point in error_cost(tmp_path / "accuracy-six.json", "time").curve] == [1.5, 3, 6, 7.5]
    assert error_cost(tmp_path / "accuracy-six.json", group="all").curve[0].error == 0.2


def test_a_folder_in_the_order_of_classes_and_only_what_has_the_group(tmp_path: Path) -> None:
    for task, classes in (("ten", 10), ("three", 3)):
        write(tmp_path, task, classes)
    write(tmp_path, "two", 2, embeddings=True)
    assert [one.task for one in all_error_costs(tmp_path)] == ["two", "three", "ten"]
    assert [one.task for one in all_error_costs(tmp_path, group="embeddings")] == ["two"]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, "six", 6)
    with pytest.raises(ValueError, match="cost"):
        error_cost(path, "money")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'rest', 'all'"):
        error_cost(path, group="embeddings")
    with pytest.raises(FileNotFoundError, match="accuracy"):
        error_cost(tmp_path / "accuracy-none.json")
    with pytest.raises(FileNotFoundError, match="accuracy"):
        all_error_costs(tmp_path / "nothing")


def test_the_picture_draws_the_data(tmp_path: Path) -> None:
    for task, classes in (("two", 2), ("six", 6)):
        write(tmp_path, task, classes)
    figure = plot_error_cost(all_error_costs(tmp_path))
    two, six = figure.axes
    curve, level, *points = six.lines
    assert list(curve.get_xdata()) == [1, 2, 4, 5]
    assert list(curve.get_ydata()) == [0.1, 0.05, 0.025, FLOOR]  # an error of zero stands at the lower edge
    assert set(level.get_ydata()) == {0.3}
    assert {line.get_label(): line.get_ydata()[0] for line in points} == {
        "Hutchinson(deflate=0) per batch": 0.3,
        "Empirical() per sample, biased": CEILING,
    }
    assert [text.get_text() for text in six.texts] == ["123"]  # what is above the ceiling is told
    assert six.get_xscale() == six.get_yscale() == "log"
    assert "C = 2" in two.get_title()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 4  # the same for both panels


def test_the_results_of_the_repository_can_be_drawn() -> None:
    networks = all_error_costs(RESULTS)
    assert "digits" in [one.task for one in networks]
    assert len(plot_error_cost(networks).axes) >= len(networks)
    for one in networks:
        assert one.curve[-1].cost == one.classes - 1
        assert one.curve[-1].error < 1e-5 < one.paper.error
