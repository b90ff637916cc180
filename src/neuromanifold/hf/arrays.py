"""NPZ arrays, class folders, and tables of numbers."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.hf.batches import Made, Rows
from neuromanifold.hf.columns import LabelReader, label_column
from neuromanifold.hf.errors import LoadError
from neuromanifold.hf.models import LoadedModel
from neuromanifold.hf.tables import Table

Inputs = Callable[[list[Any]], dict[str, Tensor]]
Arrays = dict[str, NDArray[Any]]


def read_npz(path: Path) -> Arrays:
    """All arrays; objects, which would be pickles, are refused."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise ValueError("a single array; np.savez gives arrays names")
            return {name: found[name] for name in found.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        advice = "Pickled objects are not read; write plain arrays with np.savez."
        raise LoadError(message("data", "an NPZ file of arrays", f"{path} ({error})", advice)) from error


def array_rows(
    arrays: Arrays, key: str, inputs: Inputs | None, model: LoadedModel, labels: bool | None, about: str
) -> Rows:
    """Rows of an array: 'images', 'audio' (with 'lengths'), or 'inputs' as they are."""
    if key not in arrays:
        expected = f"an NPZ file with {key!r} (and perhaps 'labels')"
        raise LoadError(message("data", expected, ", ".join(arrays) or "nothing"))
    values, lengths = arrays[key], arrays.get("lengths") if key == "audio" else None
    if key == "audio" and values.ndim != 2:
        shape = " x ".join(map(str, values.shape))
        raise LoadError(message("data", "'audio' of shape N x values, one channel", f"one of shape {shape}"))
    for name in ("labels", "lengths"):
        if name in arrays and len(arrays[name]) != len(values):
            raise LoadError(message(name, f"{len(values)} in number, as {key!r}", str(len(arrays[name]))))
    if lengths is not None and len(values) and not (lengths.min() > 0 and lengths.max() <= values.shape[1]):
        expected = f"between 1 and {values.shape[1]}, the values of a row of 'audio'"
        raise LoadError(message("lengths", expected, f"{lengths.min()} to {lengths.max()}"))
    if labels and "labels" not in arrays:
        raise LoadError(message("data", "an NPZ file with 'labels'", ", ".join(arrays)))
    targets = None if labels is False else arrays.get("labels")

    def make(rows: list[int]) -> Made:
        y = None if targets is None else LabelReader(model).tensor([targets[row].tolist() for row in rows], rows)
        if inputs is None:
            x = torch.from_numpy(np.ascontiguousarray(values[rows]))
            return (x,) if y is None else (x, y)
        entries = [values[row] if lengths is None else values[row][: int(lengths[row])] for row in rows]
        return inputs(entries) if y is None else {**inputs(entries), "labels": y}

    return Rows(len(values), make, about)


def folder_rows(
    folder: Path, suffixes: tuple[str, ...], inputs: Inputs, model: LoadedModel, labels: bool | None, about: str
) -> Rows:
    """Files in a folder for each class, FOLDER/CLASS/file; without labels they may lie anywhere below."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
        expected = f"a folder with files {', '.join(suffixes)}"
        raise LoadError(message("data", expected, f"{folder} with {inside}"))
    kinds = [path.relative_to(folder).parts[0] for path in files]
    sorted_apart = all(len(path.relative_to(folder).parts) > 1 for path in files)
    if labels and not sorted_apart:
        raise LoadError(message("data", "a folder with a folder for each class", f"files in {folder} itself"))
    wanted = sorted_apart and labels is not False
    names = sorted(set(kinds))
    numerals = all(name.isdecimal() for name in names)
    if wanted and not numerals and not model.class_names and model.classes not in (None, len(names)):
        got = f"{len(names)} ({', '.join(names[:4])})"
        advice = "Name them 0, 1, ... by the model's classes, put names into its config (label2id), or use no labels."
        raise LoadError(message("data", f"with a folder for each of the model's {model.classes} classes", got, advice))
    reader = LabelReader(model, None if numerals else names)

    def make(rows: list[int]) -> Made:
        made = inputs([str(files[row]) for row in rows])
        return {**made, "labels": reader.tensor([kinds[row] for row in rows], rows)} if wanted else made

    return Rows(len(files), make, about)


def table_rows(
    table: Table, column: str, inputs: Inputs, model: LoadedModel, given: Mapping[str, str], labels: bool | None,
    about: str,
) -> Rows:  # fmt: skip
    """Images or sounds in a column, as paths or as bytes."""
    label = label_column(table, given, labels)
    reader = LabelReader(model, table.classes.get(label or ""))

    def make(rows: list[int]) -> Made:
        made = inputs(table.take(column, rows))
        return made if label is None else {**made, "labels": reader.tensor(table.take(label, rows), rows)}

    return Rows(len(table), make, about)


def number_rows(table: Table, model: LoadedModel, given: Mapping[str, str], labels: bool | None, about: str) -> Rows:
    """Every column but the labels' is a feature: inputs [B, columns] of a module of one's own."""
    label = label_column(table, given, labels)
    target = label_column(table, given, None)  # is no feature, whether wanted or not
    features = [name for name in table.names if name != target]
    reader = LabelReader(model, table.classes.get(label or ""))

    def make(rows: list[int]) -> Made:
        try:
            columns = [[float(value) for value in table.take(name, rows)] for name in features]
        except (TypeError, ValueError) as error:
            advice = "For text, give --task; for anything else data go by module:function."
            raise LoadError(message("data", "a table of numbers", str(error), advice)) from error
        x = torch.tensor(columns).T.contiguous()
        return (x,) if label is None else (x, reader.tensor(table.take(label, rows), rows))

    return Rows(len(table), make, about)
