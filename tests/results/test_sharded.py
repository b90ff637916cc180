"""Results in several files with an index: read and added without being in memory, and whole at any time."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuromanifold as nm
from neuromanifold.results import sharded
from neuromanifold.results.files import LazyTensors
from tests.cli.commands import bad, good

DATA = list(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)).split(8))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def diagonal(**options: Any) -> nm.DiagonalFisher:
    return nm.fisher_diagonal(network(), DATA, **options)


def load(path: Path) -> nm.DiagonalFisher:
    found = nm.load(path)
    assert isinstance(found, nm.DiagonalFisher)
    return found


def same(found: nm.DiagonalFisher, expected: nm.DiagonalFisher) -> bool:
    tensors = ((one.sums[name], other.sums[name]) for one, other in [(found, expected)] for name in expected)
    noise = ((found.noise[name], expected.noise[name]) for name in expected.noise)
    alike = all(torch.equal(a, b) for a, b in [*tensors, *noise])
    return alike and list(found) == list(expected) and found.provenance == expected.provenance


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_files_and_their_index(tmp_path: Path) -> None:
    """Whole tensors in files of at most so many bytes; one tensor that is larger is alone."""
    fim, path = diagonal(), tmp_path / "fim.safetensors"
    fim.save(path, shard_size="600B")
    index = json.loads((tmp_path / "fim.safetensors.index.json").read_text())
    held: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        size = (fim.sums if name.startswith("sum/") else fim.noise)[name.partition("/")[2]].nbytes
        held[file] = held.get(file, 0) + size
    assert all(size <= 600 or size == 1024 for size in held.values())
    assert index["metadata"]["total_size"] == sum(held.values()) == sum(t.nbytes for t in fim.sums.values()) * 2
    assert names(tmp_path) == [*sorted(held), "fim.safetensors.index.json"]
    for given in (path, str(path), tmp_path / "fim.safetensors.index.json"):
        assert same(load(given), fim)  # type: ignore[arg-type]
    assert str(load(path)) == str(fim)
    fim.save(tmp_path / "small.safetensors")
    assert (tmp_path / "small.safetensors").is_file()
    with pytest.raises(ValueError, match="`shard_size` must be a size such as 5GB or 500MB, got 'much'"):
        fim.save(path, shard_size="much")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_ends_a_save_leaves_no_parts(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    fim = diagonal()
    monkeypatch.setattr(sharded, "_write_index", fails)
    with pytest.raises(error):
        fim.save(tmp_path / "fim.safetensors", shard_size=500)
    assert not list(tmp_path.iterdir())


def test_what_is_computed_from_them_waits(tmp_path: Path) -> None:
    """Sums, multiples and views, which are those of the tensors in memory."""
    parts = [diagonal(shard=(i, 2)) for i in range(2)]
    for i, part in enumerate(parts):
        part.save(tmp_path / f"{i}.safetensors", shard_size="1KB")
    expected, read = parts[0] + parts[1], [load(tmp_path / f"{i}.safetensors") for i in range(2)]
    for found, whole in (
        (read[0] + read[1], expected),
        (parts[0] + read[1], expected),
        (2 * read[0], 2 * parts[0]),
        (read[0].filter("2.*"), parts[0].filter("2.*")),
    ):
        assert isinstance(found.sums, LazyTensors)
        assert isinstance(found.noise, LazyTensors)
        assert same(found, whole)
        found.save(tmp_path / "again.safetensors", shard_size="1KB")
        assert same(load(tmp_path / "again.safetensors"), whole)
    assert same(read[0].to(torch.float64), parts[0].to(torch.float64))
    assert read[0].rows.compare(parts[0].rows).relmae == 0
    assert read[0].compare(parts[1]) == parts[0].compare(parts[1])
    assert float(read[0].trace) == float(parts[0].trace)
    (read[0] + read[1]).save(tmp_path / "0.safetensors", shard_size="1KB")  # over what it is made of
    assert same(load(tmp_path / "0.safetensors"), expected)


def test_one_result_replaces_another(tmp_path: Path) -> None:
    """A single file, several, and again: what was there before is gone."""
    path, a, b = tmp_path / "fim.safetensors", diagonal(), diagonal(seed=1)
    a.save(path)
    b.save(path, shard_size="2KB")
    assert names(tmp_path) == [*(f"fim-0000{i}-of-00002.safetensors" for i in (1, 2)), "fim.safetensors.index.json"]
    assert same(load(path), b)
    a.save(path, shard_size="2KB")
    assert names(tmp_path)[:2] == [f"fim.1-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert len(names(tmp_path)) == 3
    assert same(load(path), a)
    weights = tmp_path / "fim-00001-of-00009.safetensors"  # of a model, as others name them
    weights.write_bytes(b"weights")
    b.save(path)
    assert names(tmp_path) == [weights.name, "fim.safetensors"]
    assert same(load(path), b)


def test_parts_of_other_results_stay(tmp_path: Path) -> None:
    """fim.1-00001-of-00008 may be of fim.1.safetensors, or of fim.safetensors that was written a second time."""
    first, second = diagonal(), diagonal(seed=1)
    for name in ("fim.1.safetensors", "fim"):
        first.save(tmp_path / name, shard_size="600B")
    for size in ("600B", "600B", "5GB"):
        second.save(tmp_path / "fim.safetensors", shard_size=size)
        assert same(load(tmp_path / "fim.safetensors"), second)
        assert same(load(tmp_path / "fim.1.safetensors"), first)
        assert same(load(tmp_path / "fim"), first)
    first.save(tmp_path / "fim.1.safetensors")
    first.save(tmp_path / "fim")
    assert names(tmp_path) == ["fim", "fim.1.safetensors", "fim.safetensors"]


@pytest.mark.parametrize("size", ["600B", "5GB"])
def test_the_index_of_a_model_stays(size: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"total_size": 4}, "weight_map": {"weight": "model-00001-of-00002.safetensors"}})
    index.write_text(text)
    with pytest.raises(FileExistsError, match="is the index of a model's weights; name another file"):
        diagonal().save(tmp_path / "model.safetensors", shard_size=size)
    assert names(tmp_path) == [index.name]
    assert index.read_text() == text


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    path, index = tmp_path / "fim.safetensors", tmp_path / "fim.safetensors.index.json"
    diagonal().save(path, shard_size="2KB")
    diagonal(seed=1).save(tmp_path / "other.safetensors", shard_size="2KB")
    first, text = tmp_path / "fim-00001-of-00002.safetensors", index.read_text()
    with pytest.raises(nm.FileError, match=r"fim-00001.* has a part of a result's tensors. Read .*index.json"):
        nm.load(first)
    kept = first.read_bytes()
    first.write_bytes((tmp_path / "other-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(nm.FileError, match="is a part of another result"):
        nm.load(path)
    first.write_bytes(kept[:200])
    with pytest.raises(nm.FileError, match="is truncated or damaged"):
        nm.load(path)
    first.unlink()
    with pytest.raises(nm.FileError, match=r"names fim-00001-of-00002.safetensors, which is not there"):
        nm.load(path)
    first.write_bytes(kept)
    for wrong, told in (
        (text[:100], "is not the index of a result, or is damaged"),
        ('{"metadata": {"total_size": 3}, "weight_map": {"a": "b"}}', "It is the index of a model's weights"),
        (text.replace('"version": "1"', '"version": "9"'), "install a later neuromanifold"),
        (text.replace('"sum/0.weight"', '"sum/9.weight"'), "sum/9.weight"),
    ):
        index.write_text(wrong)
        with pytest.raises(nm.FileError, match=told):
            nm.load(path)
    index.write_text(text)
    assert same(load(path), diagonal())


def _save_forever(path: Path, results: list[nm.DiagonalFisher]) -> None:
    while True:
        for one in results:
            one.save(path, shard_size="1KB")


def test_a_process_that_is_killed_leaves_a_whole_result(tmp_path: Path) -> None:
    path, results, chance = tmp_path / "fim.safetensors", [diagonal(seed=seed) for seed in (0, 1)], random.Random(0)
    results[0].save(path, shard_size="1KB")
    for _ in range(6):
        writer = multiprocessing.get_context("fork").Process(target=_save_forever, args=(path, results))
        writer.start()
        time.sleep(chance.uniform(0.02, 0.12))
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        assert any(same(load(path), one) for one in results)
    results[1].save(path, shard_size="1KB")
    assert same(load(path), results[1])
    index = json.loads((tmp_path / "fim.safetensors.index.json").read_text())
    assert set(names(tmp_path)) == {*index["weight_map"].values(), "fim.safetensors.index.json"}


def test_commands_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagonal().save("whole.safetensors")
    for i in range(2):
        diagonal(shard=(i, 2)).save(f"{i}.safetensors", shard_size="1KB")
    assert "written:      sum.safetensors" in good(
        "combine", "0.safetensors", "1.safetensors.index.json", "-o", "sum.safetensors"
    )
    load(Path("sum.safetensors")).save("fim.safetensors", shard_size="1KB")
    assert good("show", "fim.safetensors") == good("show", "fim.safetensors.index.json")
    assert "1.0000" in good("compare", "fim.safetensors", "whole.safetensors")
    good("report", "fim.safetensors", "0.safetensors", "-o", "page.html")
    assert Path("page.html").is_file()
    assert "fim-00001-of" in bad("show", "fim-00001-of-00006.safetensors")
    torch.manual_seed(1)
    states = [network().state_dict(), {name: value + 1 for name, value in network().state_dict().items()}]
    found, expected = (nm.merge(states, [Path(name), Path(name)]) for name in ("fim.safetensors", "sum.safetensors"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
