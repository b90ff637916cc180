"""The bounds along a training: the data, and that the pictures show them."""

import pytest
from docs.figures.bounds import Moment, along_training, draw_errors, draw_traces
from matplotlib.figure import Figure
from torch import nn

import neuromanifold as nm
from neuromanifold.bounds.plot import draw_rows
from tests.run.test_contract import batches, network


def scaled(step: int) -> nn.Module:
    """More confident with each step."""
    model = network()
    model[2].weight.data *= 1 + step
    return model


@pytest.fixture(scope="module")
def moments() -> list[Moment]:
    return along_training(scaled, [0, 4, 30], batches(16)[:2])


def test_moments_have_the_bounds_of_their_network(moments: list[Moment]) -> None:
    assert [moment.step for moment in moments] == [0, 4, 30]
    assert moments[0].confidence < moments[1].confidence < moments[2].confidence <= 1
    direct = nm.fisher_bounds(scaled(4), batches(16)[:2], diagonals=False)
    rows = {row.statement: row for row in direct.rows}
    trace = rows["Cor. 6, first"].actual
    assert moments[1].row("Prop. 7") == pytest.approx([value / trace for value in rows["Prop. 7"][2:5]])
    for moment in moments:
        lower, actual, upper = moment.row("Prop. 5")
        assert lower <= actual == 1 <= upper
    with pytest.raises(ValueError, match="`statement` must be the beginning of one of"):
        moments[0].row("Theorem 1")


def test_a_network_in_training_mode_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().train()
    moment = along_training(lambda _: model, [0], batches(16)[:1])[0]
    assert model.training
    assert int(model[1].num_batches_tracked) == 0
    largest = model.eval()(batches(16)[0][0]).softmax(-1).amax(-1)
    assert moment.confidence == pytest.approx(float(largest.mean().detach()))


def test_pictures_show_every_line_and_every_statement(moments: list[Moment]) -> None:
    figure = Figure()
    traces, errors = figure.subplots(1, 2)
    draw_traces(traces, moments)
    draw_errors(errors, moments)
    labels = [text.get_text() for axes in (traces, errors) for text in axes.get_legend().get_texts()]
    for part in ("Prop. 5", "Cor. 6", "centred", "Prop. 7", "Prop. 8", "Prop. 9"):
        assert any(part in label for label in labels)
    drawn = next(line for line in errors.get_lines() if "Prop. 8" in str(line.get_label()))
    assert list(drawn.get_ydata()) == pytest.approx([moment.row("Prop. 8")[1] for moment in moments])


def test_a_result_plots_itself(moments: list[Moment]) -> None:
    result = moments[0].bounds
    axes = result.plot().axes[0]
    assert [text.get_text().split(":")[0] for text in axes.get_yticklabels()] == [
        r.statement.strip() for r in result.rows
    ]
    dots = {float(line.get_xdata()[0]) for line in axes.get_lines() if len(line.get_xdata()) == 1}
    assert result.rows[0].actual in dots
    empty = Figure().subplots()
    draw_rows(empty, [row._replace(lower=None, actual=0.0, upper=None) for row in result.rows[:2]])
    assert len(empty.get_yticks()) == 2
