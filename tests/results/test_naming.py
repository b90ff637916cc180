"""Groups of parameter names, short names, and names that fit into a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuromanifold.results.naming import components, fitted, layers, paper_components, short_names
from neuromanifold.results.table import text_table
from tests.report.results import transformer

NAMES = st.lists(
    st.lists(st.sampled_from(["layer", "encoder", "0", "1", "12", "weight", "a"]), min_size=1, max_size=6).map(
        ".".join
    ),
    unique=True,
    max_size=12,
)


def test_components_are_embeddings_blocks_and_head() -> None:
    assert list(components(list(transformer()))) == [
        "net.embed.word_embeddings",
        "net.layer.0",
        "net.layer.1",
        "classifier",
    ]
    assert list(components(["0.weight", "0.bias", "2.weight"])) == ["0", "2"]
    assert components(["a10.weight", "weight"]) == {"a10": ["a10.weight"], "weight": ["weight"]}


def test_a_network_inside_a_sequential_shows_its_blocks() -> None:
    inner = [f"0.encoder.layer.{i}.{part}.weight" for i in range(3) for part in "qkv"]
    found = components(["0.embed.weight", *inner, "1.weight", "1.bias"])
    assert list(found) == ["0.embed", *(f"0.encoder.layer.{i}" for i in range(3)), "1"]


@given(NAMES, st.integers(1, 30))
def test_every_parameter_is_in_one_component_and_in_one_layer(names: list[str], most: int) -> None:
    for groups in (components(names, most), layers(names), paper_components(names)):
        assert sorted(name for group in groups.values() for name in group) == sorted(names)
    first = {name.split(".")[0] for name in names}
    assert len(components(names, most)) <= max(most, len(first))


@given(NAMES, st.integers(1, 40))
def test_names_are_told_apart_however_little_room_there_is(names: list[str], room: int) -> None:
    shown = fitted(names, room)
    assert len(set(shown)) == len(names)
    for name, short in zip(names, shown, strict=True):
        assert short == name or (short[0] == "…" and name.endswith(short.split("…")[-1]))
        assert (short == name) or len(name) > room
    assert len(set(short_names(names).values())) == len(names)


def test_short_names_stay_apart() -> None:
    names = ["bert.layer.0", "bert.layer.1", "bert.pooler.dense", "head"]
    among = ["bert.layer.0.dense", "bert.layer.1.dense"]
    short = short_names(names, among)
    assert list(short.values()) == ["layer.0", "layer.1", "pooler.dense", "head"]
    assert short_names(["0", "2"]) == {"0": "0", "2": "2"}
    assert short_names(["a.x", "b.x", "x"]) == {"a.x": "a.x", "b.x": "b.x", "x": "x"}


def test_a_table_fits_eighty_columns_and_sets_the_last_row_apart() -> None:
    names = [f"distilbert.transformer.layer.{i}.attention.q_lin" for i in range(12)]
    rows = [(name, "7,087,872", "12.3 %", "1.23e-05", "4.56e-07", "7.89e-05", "12 %") for name in [*names, "all"]]
    header = ("component", "parameters", "zero", "mean", "median > 0", "p95 > 0", "rel. s.e.")
    lines = text_table(header, rows, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[5].startswith("…3…q_lin")
    assert len({line.split()[0] for line in lines[2:-2]}) == 12
    assert lines[1] == lines[-2] == "-" * len(lines[0])
    assert names[3] in text_table(header, rows)  # without a width, names are whole


@pytest.mark.parametrize("left", [1, 2])
def test_columns_are_aligned(left: int) -> None:
    lines = text_table(("a", "b", "c"), [("x", "yy", "1"), ("long", "y", "1,000")], left).splitlines()
    assert lines[2:] == [["x     yy      1", "long   y  1,000"], ["x     yy      1", "long  y   1,000"]][left - 1]


def test_rows_of_the_same_name_stay() -> None:
    assert fitted(["14", "14", "100"], 3) == ["14", "14", "100"]
    assert len(text_table(("classes", "λ"), [("14", "1"), ("14", "2")], width=80).splitlines()) == 4


def test_an_end_may_begin_inside_a_word_before_a_table_becomes_too_wide() -> None:
    assert fitted([f"encoder.transformer_layers.{i}" for i in range(2)], 12) == ["…er_layers.0", "…er_layers.1"]
