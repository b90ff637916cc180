"""Tables read by `datasets` (CSV, TSV, JSON, Parquet, image and audio folders, hub data sets), and NPZ arrays."""

from __future__ import annotations

import glob
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from neuromanifold.hf.errors import LoadError, hub_error, require, short
from neuromanifold.hf.functions import find_function, is_function_name

BUILDERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
MEDIA = {
    "image": (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"),
    "audio": (".wav", ".flac", ".ogg", ".mp3"),
}
_SIGNATURES = {".npz": b"PK", ".parquet": b"PAR1"}
_ON_DISK = ("dataset_dict.json", "state.json")  # files that Dataset.save_to_disk writes
_SPLITS = {"train", "validation", "valid", "val", "dev", "test"}


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, read row by row; images and audio stay undecoded."""

    name: str
    columns: tuple[str, ...]
    rows: int
    take: Callable[[str, list[int]], list[Any]]  # (column, rows) to the values, in this order
    class_names: Mapping[str, list[str]] = field(default_factory=dict)  # of columns whose values are class indices


def check_data_source(source: str, split: str = "train", subset: str | None = None, columns: object = None) -> None:
    """Raise a LoadError for data that cannot be read, at the cost of opening a file; a hub name is not looked up."""
    path, suffix = Path(source).expanduser(), Path(source).suffix.lower()
    if is_function_name(source):
        find_function(source, "data")
        if columns is not None:
            raise LoadError(f"`columns`: {source} is a function, which names its own inputs. Leave --columns out.")
    elif path.is_dir():
        _check_folder(path)
    elif path.is_file():
        _check_file(path, suffix)
    elif path.exists() or suffix in (*BUILDERS, ".npz") or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise LoadError(f"No data file or folder found at {source!r}. There is no {path}.")
    if (subset is not None or split != "train") and (is_function_name(source) or path.is_file()):
        option = f"--split {split}" if subset is None else f"--subset {subset}"
        raise LoadError(f"{option} chooses a part of a data set or folder, but {source} has no parts. Leave it out.")


def _check_file(path: Path, suffix: str) -> None:
    if suffix not in BUILDERS and suffix != ".npz":
        known = ", ".join((*BUILDERS, ".npz"))
        raise LoadError(
            f"{path} is a file of an unknown kind: expected one of {known}, got {suffix or 'no suffix'}. Pickles are "
            "not read. Convert it, or write a function that returns batches (module:function)."
        )
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from error
    if not start:
        raise LoadError(f"{path} is empty: expected a file with rows.")
    if not start.startswith(_SIGNATURES.get(suffix, b"")):
        kind = "an NPZ file as np.savez writes it" if suffix == ".npz" else "a Parquet file"
        raise LoadError(f"{path} is not {kind}, or is damaged. Write it again.")


def _check_folder(path: Path) -> None:
    known = {*BUILDERS, *MEDIA["image"], *MEDIA["audio"]}
    try:
        if any(file.suffix.lower() in known and file.name != "config.json" for file in path.rglob("*")):
            return
        inside = ", ".join(sorted(file.name for file in path.iterdir())[:6]) or "nothing"
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from error
    raise LoadError(f"No data found in {path}: expected tables ({', '.join(BUILDERS)}), images or audio, got {inside}.")


def read_table(source: str, split: str = "train", subset: str | None = None, media: str | None = None) -> Table:
    """Read a local file or folder, or a hub data set; `media` is the kind of files in a folder, "image" or "audio"."""
    check_data_source(source, split, subset)
    path, suffix = Path(source).expanduser(), Path(source).suffix.lower()
    if path.is_file():
        return read_npz(path) if suffix == ".npz" else _read_file(path, suffix)
    name = " ".join(filter(None, (source, subset, split)))
    if not path.is_dir():
        return _as_table(_load_dataset(source, subset, split), name)
    if any((path / file).is_file() for file in _ON_DISK):
        return _as_table(_from_disk(path, split), name)
    suffixes = {file.suffix.lower() for file in path.rglob("*")}
    if media is not None and (not suffixes.isdisjoint(MEDIA[media]) or suffixes.isdisjoint(BUILDERS)):
        return _read_folder(path, split, media)
    if suffixes.isdisjoint(BUILDERS):
        raise LoadError(f"No tables ({', '.join(BUILDERS)}) found in {path}. For images or audio, give --task.")
    return _as_table(_load_dataset(str(path), subset, split), name)


def _read_file(path: Path, suffix: str) -> Table:
    options: dict[str, Any] = {}
    if BUILDERS[suffix] == "csv":  # every cell as the text it is: "007", "NA" and "null" are not numbers or missing
        options = {"sep": "\t" if suffix == ".tsv" else ",", "keep_default_na": False, "index_col": False}
        options["features"] = _string_features(path, options["sep"])
    return _as_table(_load_files(BUILDERS[suffix], path, **options), str(path))


def _string_features(path: Path, separator: str) -> Any:
    datasets, pandas = require("datasets", "hf", "A table"), require("pandas", "hf", "A table")
    try:
        head = pandas.read_csv(path, sep=separator, header=None, nrows=1, dtype=str, keep_default_na=False)
    except (ValueError, OSError) as error:  # among them UnicodeDecodeError and those of pandas
        raise LoadError(f"{path} is not a CSV file in UTF-8 ({short(error)}).") from error
    names = [name or f"Unnamed: {i}" for i, name in enumerate(head.iloc[0])]
    doubled = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if doubled is not None:
        raise LoadError(f"Column {doubled!r} occurs twice in {path}. Rename one of them.")
    return datasets.Features({name: datasets.Value("string") for name in names})


def _read_folder(path: Path, split: str, media: str) -> Table:
    """Files of FOLDER/CLASS/file, or FOLDER/SPLIT/CLASS/file; labels are the names of the class folders."""
    folders = {child.name for child in path.iterdir() if child.is_dir()}
    name = str(path)
    if folders and folders <= _SPLITS:
        if split not in folders:
            raise LoadError(f"{path} has no split {split!r} (splits: {', '.join(sorted(folders))}). Give --split.")
        path, name = path / split, f"{path} {split}"
    elif split != "train":
        raise LoadError(f"{path} has no split {split!r}: expected a folder {path / split}. Leave --split out.")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in MEDIA[media])
    if not files:
        raise LoadError(f"No {media} files found in {path}: expected files {', '.join(MEDIA[media])}.")
    if any(path.rglob("metadata.*")):  # a table beside the files, with labels and more
        return _as_table(_load_files(f"{media}folder", path, "/**"), name)
    # Listed here: the folder builders of `datasets` take a second per thousand files, and that of audio torchcodec.
    columns = {media: [str(file) for file in files]}
    if all(len(file.relative_to(path).parts) == 2 for file in files):
        columns["label"] = [file.parent.name for file in files]
    classes = sorted(set(columns.get("label", ())))
    numbered = all(entry.isdecimal() for entry in classes)  # folders 0, 1, ... are the model's classes
    dataset = require("datasets", "hf", f"A folder of {media} files").Dataset.from_dict(columns)
    return replace(_as_table(dataset, name), class_names={} if numbered else {"label": classes})


def _from_disk(path: Path, split: str) -> Any:
    datasets = require("datasets", "hf", "A saved data set")
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as a data set ({short(error)}).") from error
    splits = dataset if isinstance(dataset, dict) else {str(dataset.split or "train"): dataset}
    if split not in splits:
        raise LoadError(f"{path} has no split {split!r} (splits: {', '.join(splits)}). Give another --split.")
    return splits[split]


def _load_files(builder: str, path: Path, pattern: str = "", **options: Any) -> Any:
    """Read local files into memory by one of datasets' builders; nothing stays in its cache, which could be stale."""
    datasets, pandas = require("datasets", "hf", "A table or folder"), require("pandas", "hf", "A table or folder")
    options |= {"data_files": glob.escape(str(path.absolute())) + pattern, "split": "train", "keep_in_memory": True}
    try:
        with TemporaryDirectory() as cache, _quiet(datasets, local=True), warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # cells beyond the header's would be dropped
            return datasets.load_dataset(builder, cache_dir=cache, **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, StopIteration, OSError) as error:
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            raise LoadError(f"{path} has no rows: expected at least one.") from error
        kind = {"csv": "a CSV file in UTF-8", "json": "JSON lines or a JSON list", "parquet": "a Parquet file"}
        said = short(error.__cause__ or error)
        raise LoadError(f"{path} is not {kind.get(builder, 'a readable folder')} ({said}).") from error


def _load_dataset(source: str, subset: str | None, split: str) -> Any:
    """Load a data set by its name on the hub or from a local copy."""
    datasets = require("datasets", "hf", "A data set of the hub, or a folder of tables,")
    local = Path(source).is_dir()
    try:
        with _quiet(datasets, local):
            return datasets.load_dataset(source, name=subset, split=split)
    except datasets.exceptions.DatasetGenerationError as error:
        said = short(error.__cause__ or error)
        raise LoadError(f"{source} holds files that are not tables with the same columns ({said}).") from error
    except ValueError as error:
        raise LoadError(f"{source} has no such part ({short(error)}). Give another --subset or --split.") from error
    except OSError as error:
        if not local:
            raise hub_error("data", source, error) from error
        raise LoadError(f"{source} cannot be read as a data set ({short(error)}).") from error


@contextmanager
def _quiet(datasets: Any, local: bool) -> Iterator[None]:
    """Silence the log, which repeats what the errors say, and for local files the progress bars."""
    verbosity, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if local:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if local and bars:
            datasets.enable_progress_bars()


def _as_table(dataset: Any, name: str) -> Table:
    datasets = require("datasets", "hf", "A table")
    for column, feature in dataset.features.items():
        if isinstance(feature, (datasets.Image, datasets.Audio)):
            dataset = dataset.cast_column(column, type(feature)(decode=False))
    columns = {column: dataset.select_columns([column]) for column in dataset.column_names}
    classes = {name: list(feature.names) for name, feature in dataset.features.items() if hasattr(feature, "names")}

    def take(column: str, rows: list[int]) -> list[Any]:
        values: list[Any] = columns[column][rows][column]
        return values

    return Table(name, tuple(columns), len(dataset), take, classes)


def read_npz(path: Path) -> Table:
    """Read arrays whose first dimension is the row; objects, which would be pickles, are refused."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        advice = "Pickled objects are not read; write arrays with np.savez."
        raise LoadError(f"{path} is not an NPZ file of arrays ({short(error)}). {advice}") from error
    main = next((name for name in ("images", "audio", "inputs") if name in arrays), next(iter(arrays), None))
    if main is None or not arrays[main].ndim:
        raise LoadError(f"{path} has no arrays with rows (arrays: {', '.join(arrays) or 'none'}).")
    values, lengths = arrays[main], arrays.get("lengths") if main == "audio" else None
    for name in ("labels", "lengths"):
        if name in arrays and arrays[name].shape[:1] != values.shape[:1]:
            raise LoadError(f"{path}: expected {len(values)} {name}, one for each row of {main!r}, "
                            f"got shape {list(arrays[name].shape)}.")  # fmt: skip
    if main == "audio" and values.ndim != 2:
        raise LoadError(f"{path}: expected 'audio' of shape [N, samples], one channel, got {list(values.shape)}.")
    if lengths is not None and len(values) and not (lengths.min() > 0 and lengths.max() <= values.shape[1]):
        raise LoadError(f"{path}: expected lengths between 1 and {values.shape[1]}, the samples of a row of 'audio', "
                        f"got {lengths.min()} to {lengths.max()}.")  # fmt: skip

    def take(column: str, rows: list[int]) -> list[Any]:
        if column == "audio" and lengths is not None:
            return [values[row][: int(lengths[row])] for row in rows]
        return list(arrays[column][rows])

    columns = tuple(name for name, array in arrays.items() if array.shape[:1] == values.shape[:1])
    return Table(str(path), columns, len(values), take)
