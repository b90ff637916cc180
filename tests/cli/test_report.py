"""`neuromanifold report` as a user sees it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from neuromanifold.cli.app import app
from tests.report.results import result, transformer

FIM = result(transformer())


def test_a_page_of_one_result_and_of_several(tmp_path: Path) -> None:
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for i, file in enumerate(files):
        result(transformer(i)).save(file)
    for given in (files[:1], files):
        out = tmp_path / f"page{len(given)}.html"
        made = CliRunner().invoke(app, ["report", *map(str, given), "-o", str(out)])
        assert made.exit_code == 0, made.output
        assert str(out) in made.output
        text = out.read_text(encoding="utf-8")
        assert ("ratio, second" in text) == (len(given) == 2)
        assert "classifier.weight" in text


def test_the_page_goes_to_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FIM.save(tmp_path / "fim.safetensors")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", "fim.safetensors"]).exit_code == 0
    assert (tmp_path / "fisher.html").stat().st_size > 20_000


@pytest.mark.parametrize("what", ["missing", "trace", "damaged", "no folder"])
def test_what_cannot_be_done_is_said(tmp_path: Path, what: str) -> None:
    file, out = tmp_path / "fim.safetensors", tmp_path / "page.html"
    FIM.save(file)
    if what == "missing":
        file.unlink()
    elif what == "trace":
        FIM.trace.save(file)
    elif what == "damaged":
        file.write_bytes(file.read_bytes()[:100])
    else:
        out = tmp_path / "nowhere" / "page.html"
    made = CliRunner().invoke(app, ["report", str(file), "-o", str(out)])
    assert made.exit_code != 0
    said = made.output + str(made.exception)
    words = {"missing": "No file", "trace": "diagonal", "damaged": "damaged", "no folder": "nowhere"}
    assert words[what] in said
    assert not out.exists()
