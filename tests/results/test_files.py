"""Files of results: every kind is read again, and whatever is none is named for what it is."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import neuromanifold as nm
from neuromanifold.results.files import byte_size, check_destination, save_text
from tests.run.test_contract import MODEL, batches

RESULT = nm.fisher_diagonal(MODEL, batches(16), seed=1)
TRACE = nm.fisher_trace(MODEL, batches(16), seed=1)


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    RESULT.sum.save(tmp_path / "fisher.safetensors")
    loaded = nm.load(tmp_path / "fisher.safetensors")
    assert isinstance(loaded, nm.DiagonalFisher)
    assert loaded.provenance == RESULT.provenance
    assert (loaded.count, loaded.positions, loaded.reduction) == (64, 64, "sum")
    for name in RESULT:
        assert torch.equal(loaded.mean[name], RESULT[name])
        assert torch.equal(loaded.mean.stderr[name], RESULT.stderr[name])
    assert list(loaded) == list(RESULT)  # in the model's order
    assert [path.name for path in tmp_path.iterdir()] == ["fisher.safetensors"]
    for name in ("trace.json", "trace.txt"):
        TRACE.save(tmp_path / name)
        assert nm.load(tmp_path / name) == TRACE


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_damaged_foreign_and_future_files_get_a_clear_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"result.{suffix}"
    with pytest.raises(FileNotFoundError, match="No file"):
        nm.load(path)
    (TRACE if suffix == "json" else RESULT).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(nm.FileError, match="damaged"):
        nm.load(path)
    if suffix == "json":
        path.write_text(json.dumps({"some": "thing"}))
    else:
        save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(nm.FileError, match="not written by neuromanifold"):
        nm.load(path)
    head = {"format": "neuromanifold", "version": "99", "kind": "diagonal"}
    if suffix == "json":
        path.write_text(json.dumps(head))
    else:
        save_file({"weight": torch.zeros(2)}, path, metadata=head)
    with pytest.raises(nm.FileError, match=r"version 99.*later neuromanifold"):
        nm.load(path)
    head["version"] = "1"
    if suffix == "json":
        path.write_text(json.dumps(head))
    else:
        save_file({"weight": torch.zeros(2)}, path, metadata=head)
    with pytest.raises(nm.FileError, match="damaged"):
        nm.load(path)


def test_nothing_is_lost_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fisher.safetensors"
    RESULT.save(path)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("neuromanifold.results.files.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        RESULT.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with pytest.raises(FileNotFoundError, match="No folder"):
        RESULT.save(tmp_path / "missing" / "fisher.safetensors")


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: after a power cut there is the old file or the new one.  Elsewhere tests do not wait for the disk."""
    path, seen = tmp_path / "fim.json", []
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda file: seen.append((path.read_text(), os.fstat(file).st_size)))
    save_text(path, "new and longer")
    assert seen == [("old", len("new and longer"))]
    assert path.read_text() == "new and longer"


def test_equal_results_are_equal_files(tmp_path: Path) -> None:
    """And what safetensors itself reads of them is not changed by that."""
    names = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for name in names:
        RESULT.save(name)
    assert len({name.read_bytes() for name in names}) == 1
    with safe_open(names[0], framework="pt") as file:
        assert file.metadata()["kind"] == "diagonal"
        for name, value in RESULT.sums.items():
            assert torch.equal(file.get_tensor(f"sum/{name}"), value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder; name a file"):
        RESULT.save(tmp_path)


RESULTS: dict[str, Any] = {
    "diagonal": RESULT,
    "trace": TRACE,
    "factors": nm.fisher_factors(MODEL, batches(16)),
    "matrix": nm.fisher_matrix(MODEL, batches(16), blocks="layer"),
    "bounds": nm.fisher_bounds(MODEL, batches(16), diagonals=False, actual="none"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_is_read_by_the_same_function_whatever_its_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "some name"
    RESULTS[kind].save(path)
    loaded = nm.load(str(path))
    assert type(loaded) is type(RESULTS[kind])
    assert str(loaded) == str(RESULTS[kind])
    assert loaded.provenance == RESULTS[kind].provenance
    whole = path.read_bytes()
    for part in (0, 5, 40, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:part])
        with pytest.raises(nm.FileError, match=r"empty|truncated|damaged"):
            nm.load(path)


def says(path: Path, *words: str) -> None:
    with pytest.raises((nm.FileError, OSError)) as caught:
        nm.load(path)
    for word in (*words, path.name):
        assert word in str(caught.value), caught.value


def test_what_is_no_result_is_named_for_what_it_is(tmp_path: Path) -> None:
    """With what to do about it."""
    path = tmp_path / "fim.safetensors"
    torch.save(MODEL.state_dict(), tmp_path / "model.pt")
    says(tmp_path / "model.pt", "is a pickle", "can run any code", "fim.save(path)")
    torch.save(MODEL.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    says(tmp_path / "old.pt", "is a pickle")
    save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    says(tmp_path / "model.safetensors", "weights of a model", "1 tensors such as 'encoder.weight'", "fisher_diagonal")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    says(tmp_path / "config.json", "configuration of a model", "fisher_diagonal")
    says(tmp_path, "folder of a model")
    (tmp_path / "runs").mkdir()
    says(tmp_path / "runs", "is a folder", "Name a file.")
    RESULT.save(tmp_path / "runs" / "a.safetensors")
    says(tmp_path / "runs", "Name a file, such as a.safetensors")
    nm.fisher_diagonal(MODEL, batches(16), checkpoint=tmp_path / "checkpoint")
    says(tmp_path / "checkpoint", "the checkpoint of a run", "Repeat the call")
    RESULT.report(tmp_path / "fisher.html")
    says(tmp_path / "fisher.html", "is a page")
    (tmp_path / "list.json").write_text("[1, 2]")
    says(tmp_path / "list.json", "not a safetensors file")
    save_file({"a": torch.zeros(1)}, path, metadata={"format": "neuromanifold", "version": "1", "kind": "tensor train"})
    says(path, "'tensor train'", "diagonal", "matrix")
    with pytest.raises(FileNotFoundError, match=r"No file .*fin.safetensors. Did you mean fim.safetensors\?"):
        nm.load(tmp_path / "fin.safetensors")


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("neuromanifold.results.files.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        RESULT.save(tmp_path / "fim.safetensors")
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).endswith("fim.safetensors")  # not the temporary one
    assert not isinstance(caught.value, nm.FileError)


def test_destinations_are_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="a device or a pipe"):
        RESULT.save(pipe)
    assert pipe.is_fifo()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(OSError, match=r"takes 2 kB, and 10 bytes are free in .* Make room") as caught:
        check_destination(tmp_path / "fim.safetensors", 2000)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="cannot be written to: it is read-only"):
        check_destination(tmp_path / "fim.safetensors", 2000)
    with pytest.raises(PermissionError, match="read-only"):
        save_text(tmp_path / "page.html", "text")


@pytest.mark.parametrize(("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1e4, "10 kB"), (2.5e9, "2.5 GB")])
def test_byte_sizes(count: float, text: str) -> None:
    assert byte_size(count) == text
