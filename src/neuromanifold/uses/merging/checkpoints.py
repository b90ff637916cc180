"""Checkpoints larger than memory: safetensors read one tensor at a time, written in shards as transformers does.

source_of(model)          a folder, a file, a module or a state dict as names, shapes, and a function that reads one
write_checkpoint(...)     the tensors of a mapping in model-00001-of-00003.safetensors, ... and their index
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.progress import tracked
from neuromanifold.results.files import FORMAT, FileError, check_destination
from neuromanifold.results.sharded import by_size

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_INDEX, _SINGLE, _ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"


@dataclass(frozen=True, eq=False)
class TensorSource(Mapping[str, Tensor]):
    """Tensors by name, each of which is read when it is asked for."""

    about: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    folder: Path | None = None  # where the configuration and the tokenizer lie

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterable[str]:  # type: ignore[override]
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def source_of(model: object, argument: str = "model") -> TensorSource:
    """Return the tensors of a folder of transformers, of a safetensors file, of a module or of a state dict."""
    if isinstance(model, nn.Module):
        return _from_tensors(model.state_dict(), type(model).__name__)
    if isinstance(model, Mapping):
        return _from_tensors(model, f"{argument} with {len(model)} tensors")
    if not isinstance(model, str | Path):
        expected = "a folder, a safetensors file, a torch.nn.Module or a state dict"
        raise TypeError(message(argument, expected, type(model).__name__))
    path = Path(model).expanduser()
    if path.is_dir():
        return from_files(_files_of(path, argument), str(model), path)
    if not path.is_file():
        raise FileNotFoundError(message(argument, "a folder or a file that exists", repr(str(model))))
    if path.suffix != ".safetensors":
        advice = "A pickle can run any code, so none is read. Convert it: model.save_pretrained(folder)."
        raise ValueError(message(argument, "a folder or a *.safetensors file", str(model), advice))
    return from_files([path], str(model), None)


def from_files(files: Iterable[Path], about: str, folder: Path | None, results: bool = False) -> TensorSource:
    """Return the tensors of safetensors files, of which only the headers are read now."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    places: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                head = file.metadata() or {}
                if head.get("format") == FORMAT and not results:
                    raise ValueError(message("models", "files of weights", f"{path}, a result ({head.get('kind')})"))
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    part = file.get_slice(name)
                    if part.get_dtype() not in _DTYPES:
                        got = f"{part.get_dtype()} for {name}"
                        raise ValueError(message("model", "of a dtype that torch computes with", got))
                    places[name], shapes[name] = path, tuple(part.get_shape())
                    dtypes[name] = _DTYPES[part.get_dtype()]
        except SafetensorError as error:
            raise FileError(f"{path} is truncated or damaged ({error}). Copy it again.") from error

    def read(name: str) -> Tensor:
        with safe_open(places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return TensorSource(about, shapes, dtypes, read, folder)


def _from_tensors(tensors: Mapping[str, object], about: str) -> TensorSource:
    held = {name: tensor.detach() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    shapes, dtypes = {n: tuple(t.shape) for n, t in held.items()}, {n: t.dtype for n, t in held.items()}
    return TensorSource(about, shapes, dtypes, held.__getitem__)


def _files_of(folder: Path, argument: str) -> list[Path]:
    """The safetensors files of a folder, according to its index if there is one."""
    index = folder / _INDEX
    if index.is_file():
        files = [folder / name for name in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())]
        if missing := [file.name for file in files if not file.is_file()]:
            raise FileNotFoundError(message(argument, f"with all files of {_INDEX}", f"{folder} without {missing[0]}"))
        return files
    files = sorted(path for path in folder.glob("*.safetensors"))
    if [path.name for path in files] == [_ADAPTER]:
        advice = "The product of averaged factors is not the average: merge_and_unload() it into its model first."
        raise ValueError(message(argument, "a model", f"an adapter, {folder}", advice))
    if len(files) != 1 and (folder / _SINGLE) not in files:
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
        raise ValueError(message(argument, f"a folder with {_SINGLE} or {_INDEX}", f"{folder} with {inside}"))
    return [folder / _SINGLE] if folder / _SINGLE in files else files


# ---------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    folder: Path,
    configuration: Path | None,
    notes: Mapping[str, object],
    shard_size: int,
    progress: bool,
) -> None:
    """Write the tensors to a new folder, aside and renamed at the end; memory holds a shard and its serialized copy.

    All files of `configuration` but weights and its model card are copied; `notes` become merge.json.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = f"{folder}, which has files" if folder.is_dir() else f"{folder}, a file"
        raise FileExistsError(message("output", "a new folder, or an empty one", got))
    shards = by_size(sizes, shard_size)
    check_destination(folder.parent / f"{folder.name}.aside", sum(sizes.values()))
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as aside:
        made = Path(aside) / folder.name
        made.mkdir()
        held: dict[str, Tensor] = {}
        ends = {shard[-1]: i for i, shard in enumerate(shards) if shard}
        where: dict[str, str] = {}
        for name in tracked(list(sizes), "Merging") if progress else sizes:
            held[name] = tensors[name].contiguous().cpu()
            if name in ends:
                number = f"-{ends[name] + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                file = f"model{number}.safetensors"
                save_file(held, made / file, metadata={"format": "pt"})
                where |= dict.fromkeys(held, file)
                held = {}
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
            (made / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for path in sorted(configuration.iterdir()) if configuration else ():
            if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in ("README.md", "merge.json"):
                shutil.copyfile(path, made / path.name)
        (made / "merge.json").write_text(json.dumps(notes, indent=2) + "\n")
        if folder.exists():
            folder.rmdir()
        made.replace(folder)
