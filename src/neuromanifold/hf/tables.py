"""Tables: CSV, TSV, JSONL, Parquet, and data sets of the hub, behind one small interface."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError, hub_error, require

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


class Table(ABC):
    """Named columns of equal length."""

    names: list[str]
    classes: dict[str, list[str]]  # names of the classes of a column of numbers, where they are known

    @abstractmethod
    def __len__(self) -> int:
        """Rows."""

    @abstractmethod
    def take(self, name: str, rows: list[int]) -> list[Any]:
        """Some rows of a column, in this order."""


class ListTable(Table):
    """Columns as lists."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self.names, self.classes = columns, list(columns), {}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def take(self, name: str, rows: list[int]) -> list[Any]:
        """From the list."""
        column = self.columns[name]
        return [column[row] for row in rows]


class ArrowTable(Table):
    """Columns as Arrow holds them; images and sounds stay bytes."""

    def __init__(self, names: list[str], size: int, rows_of: Callable[[str, list[int]], Any]) -> None:
        self.names, self._size, self._rows_of, self.classes = names, size, rows_of, {}

    def __len__(self) -> int:
        return self._size

    def take(self, name: str, rows: list[int]) -> list[Any]:
        """As Python's values."""
        values: list[Any] = self._rows_of(name, rows).to_pylist()
        return values


def read_table(path: Path) -> Table:
    """A local file, by its suffix."""
    read = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".json": _jsonl, ".parquet": _parquet}[path.suffix.lower()]
    table = read(path)
    doubled = next((name for i, name in enumerate(table.names) if name in table.names[:i]), None)
    if doubled is not None:
        raise LoadError(message("data", "a table whose columns have different names", f"{doubled!r} twice in {path}"))
    if not len(table):
        raise LoadError(message("data", "a file with rows", f"none in {path}"))
    return table


def _csv(path: Path) -> Table:
    limit = csv.field_size_limit(2**31 - 1)  # whole documents may stand in a cell
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            names = next(reader, [])
            lists: list[list[Any]] = [[] for _ in names]
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    got = f"{len(cells)} at line {reader.line_num} of {path}"
                    raise LoadError(message("data", f"a table with {len(names)} cells a row (as in its head)", got))
                for values, cell in zip(lists, cells, strict=True):
                    values.append(cell)
    except (csv.Error, UnicodeDecodeError) as error:
        raise LoadError(f"`data`: {path} is not a CSV file in UTF-8 ({error}).") from error
    finally:
        csv.field_size_limit(limit)
    table = ListTable(dict(zip(names, lists, strict=True)))
    table.names = names
    return table


def _jsonl(path: Path) -> Table:
    records: list[Any] = []
    read = 0  # lines
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            for line in text.split("\n"):  # a string may hold other ends of lines, such as U+2028
                records += [json.loads(line)] if line.strip() else []
                read += 1
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        got = f"{path}, where line {read + 1} cannot be read ({error})"
        raise LoadError(message("data", "a JSON object in each line", got)) from error
    wrong = next((i for i, record in enumerate(records) if not isinstance(record, dict)), None)
    if wrong is not None:
        raise LoadError(
            message("data", "a JSON object in each line", f"{type(records[wrong]).__name__} in row {wrong}")
        )
    names = list(dict.fromkeys(name for record in records for name in record))
    return ListTable({name: [record.get(name) for record in records] for name in names})


def _parquet(path: Path) -> Table:
    parquet = require("pyarrow.parquet", "hf", "A Parquet file")
    arrow = require("pyarrow", "hf", "A Parquet file")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise LoadError(f"`data`: {path} is not a Parquet file, or is damaged ({error}).") from error
    return ArrowTable(list(table.column_names), table.num_rows, lambda name, rows: table.column(name).take(rows))


def hub_table(source: str, subset: str | None, split: str) -> Table:
    """A data set of the hub."""
    try:
        return _dataset(source, subset, split)
    except OSError as error:
        raise hub_error("data", source, error) from error


def folder_table(path: Path, subset: str | None, split: str) -> Table:
    """A local copy of a data set: a folder of tables, as it is on the hub."""
    if not any(file.suffix in SUFFIXES for file in path.rglob("*")):
        inside = ", ".join(sorted(file.name for file in path.iterdir())[:6]) or "nothing"
        expected = f"a folder with tables ({', '.join(SUFFIXES)})"
        raise LoadError(message("data", expected, f"{path} with {inside}"))
    try:
        return _dataset(str(path), subset, split)
    except OSError as error:
        raise LoadError(
            f"`data`: {path} cannot be read as a data set ({' '.join(str(error).split())[:400]})."
        ) from error


def _dataset(source: str, subset: str | None, split: str) -> Table:
    """Nothing of it is decoded."""
    datasets = require("datasets", "hf", "A data set of the hub, or a folder of tables,")
    try:
        dataset = datasets.load_dataset(source, name=subset, split=split)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            said = " ".join(str(error.__cause__ or error).split())[:400]
            raise LoadError(f"`data`: {source} holds files that are no tables of one kind ({said}).") from error
        said = " ".join(str(error).split())[:400]
        raise LoadError(f"`data`: {source} has no such part ({said}); see --subset and --split.") from error
    plain = dataset.with_format("arrow")
    table = ArrowTable(list(dataset.column_names), len(dataset), lambda name, rows: plain[rows].column(name))
    table.classes = {
        name: list(feature.names) for name, feature in dataset.features.items() if hasattr(feature, "names")
    }
    return table
