"""The options that say which model and which data: the same for every command that needs them, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from neuromanifold.core.checks import message
from neuromanifold.hf import FunctionData, LoadedData, LoadedModel, Task, check_data_source, load_data, load_model
from neuromanifold.hf.models import DTYPES
from neuromanifold.problem.parameters import select_parameters

_MODEL, _DATA, _RUN = "Model", "Data", "Run"
_TASKS = ", ".join(Task)
_SIZE = "32"  # of a batch, unless told otherwise


def _option(*names: str, panel: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, **more)


@dataclass(frozen=True)
class Setup:
    """A model, data for it, and which parameters."""

    model: Annotated[
        str,
        _option(
            "--model", "-m", panel=_MODEL, metavar="MODEL",
            text="A folder (config.json, *.safetensors), a name on the Hugging Face hub, or package.module:function, "
            "where the function returns a torch module.",
        ),
    ]  # fmt: skip
    data: Annotated[
        str,
        _option(
            "--data", "-d", panel=_DATA, metavar="DATA",
            text="A CSV, TSV, JSONL, Parquet or NPZ file; a folder with a folder of images or sounds for each class; a "
            "data set's name on the hub; or package.module:function, where the function returns batches.",
        ),
    ]  # fmt: skip
    task: Annotated[
        str | None, _option("--task", panel=_MODEL, text=f"What the model does: {_TASKS}. Found from its config.")
    ] = None
    adapter: Annotated[
        str | None,
        _option(
            "--adapter", panel=_MODEL, metavar="ADAPTER",
            text="A PEFT adapter (folder or hub name): the Fisher information of its parameters.",
        ),
    ] = None  # fmt: skip
    classes: Annotated[
        int | None,
        _option(
            "--classes", panel=_MODEL, metavar="N", min=1,
            text="For a checkpoint without a trained classifier: draw one for N classes, with --seed.",
        ),
    ] = None  # fmt: skip
    processor: Annotated[
        str | None,
        _option(
            "--processor", panel=_MODEL, metavar="FOLDER",
            text="Where tokenizer, image processor or feature extractor are, if not beside the model.",
        ),
    ] = None  # fmt: skip
    revision: Annotated[
        str | None, _option("--revision", panel=_MODEL, metavar="REV", text="Branch, tag or commit on the hub.")
    ] = None
    dtype: Annotated[
        str | None,
        _option(
            "--dtype", panel=_MODEL,
            text=f"Precision of the model: {', '.join(DTYPES)}. By default float32, or what the function's module has.",
        ),
    ] = None  # fmt: skip
    device: Annotated[
        str, _option("--device", panel=_MODEL, text="auto (a GPU if there is one), cpu, cuda, cuda:1, mps.")
    ] = "auto"
    parameters: Annotated[
        list[str] | None,
        _option(
            "--parameters", "-p", panel=_MODEL, metavar="PATTERN",
            text="Only parameters whose names match, such as 'encoder.*'; may be given several times.",
        ),
    ] = None  # fmt: skip
    split: Annotated[str, _option("--split", panel=_DATA, text="Which split of a hub data set.")] = "train"
    subset: Annotated[
        str | None,
        _option("--subset", panel=_DATA, text="Which configuration of a hub data set, such as sst2 of glue."),
    ] = None
    columns: Annotated[
        str | None,
        _option(
            "--columns", panel=_DATA, metavar="ROLE=COLUMN,...",
            text="Which column holds what, such as text=body,label=stars. Roles: text, text_pair, words, image, audio, "
            "label. Usual names are found without.",
        ),
    ] = None  # fmt: skip
    batch_size: Annotated[
        str, _option("--batch-size", "-b", panel=_DATA, metavar="N|auto", text="Rows in a batch; auto: what fits.")
    ] = _SIZE
    batches: Annotated[
        int | None,
        _option(
            "--batches", "-n", panel=_DATA, metavar="N", min=1,
            text="How many batches, of rows drawn at random with --seed. By default all rows.",
        ),
    ] = None  # fmt: skip
    max_length: Annotated[
        int | None,
        _option(
            "--max-length", panel=_DATA, metavar="N", min=1,
            text="Cut text to N tokens (by default what the model takes, at most 512), sound to N values.",
        ),
    ] = None  # fmt: skip
    mask: Annotated[
        float, _option("--mask", panel=_DATA, text="Share of tokens that is masked, for masked language models.")
    ] = 0.15
    likelihood: Annotated[
        str | None,
        _option(
            "--likelihood", panel=_MODEL,
            text="What the outputs mean: categorical, bernoulli (several labels) or gaussian (regression). By default "
            "what the config says, else categorical.",
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int,
        _option(
            "--seed",
            panel=_RUN,
            min=0,
            metavar="N",
            text="Of everything that is random: rows, noise, a drawn classifier.",
        ),
    ] = 0

    def load_model(self) -> LoadedModel:
        """Load the model onto its device, after checking that the data can be read."""
        check_data_source(self.data, self.split, self.subset, self.columns)
        loaded = load_model(
            self.model,
            self.task,
            adapter=self.adapter,
            classes=self.classes,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            revision=self.revision,
            processor=self.processor,
        )
        for pattern in self.parameters or ():
            select_parameters(loaded.module, [pattern])  # each of them has to match something
        return loaded

    def load_data(
        self, model: LoadedModel, labels: bool | None, batch_size: int | None = None
    ) -> LoadedData | FunctionData:
        """The data; of a given batch size where it has been found."""
        data = load_data(
            self.data,
            model,
            split=self.split,
            subset=self.subset,
            columns=self.columns,
            labels=labels,
            batch_size=batch_size or self.size or 1,
            batches=self.batches,
            max_length=self.max_length,
            mask=self.mask,
            seed=self.seed,
        )
        if isinstance(data, FunctionData) and self.batch_size not in (_SIZE, "auto"):
            advice = "The function says how large they are."
            raise ValueError(message("batch-size", "left out for batches of one's own", self.batch_size, advice))
        return data

    @property
    def number(self) -> int:
        """The batch size, where none is looked for."""
        if self.size is None:
            raise ValueError(message("batch-size", "a number", "auto", "neuromanifold forecast -b auto finds one."))
        return self.size

    @property
    def size(self) -> int | None:
        """The batch size; None: to be found."""
        if self.batch_size == "auto":
            return None
        if not self.batch_size.isdigit() or not int(self.batch_size):
            raise ValueError(message("batch-size", "a number of rows, or auto", repr(self.batch_size)))
        return int(self.batch_size)


def with_setup(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its first argument, a `Setup`, as options of its own."""
    hints, own = get_type_hints(Setup, include_extras=True), inspect.signature(command, eval_str=True)
    names = [field.name for field in fields(Setup)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(
            field.name,
            keyword,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(Setup)
    ]
    rest = [parameter.replace(kind=keyword) for parameter in list(own.parameters.values())[1:]]

    @wraps(command)
    def run(**values: Any) -> None:
        command(Setup(**{name: values.pop(name) for name in names}), **values)

    run.__signature__ = inspect.Signature([*shared, *rest])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*shared, *rest)}
    return run


def check_output(path: Path, *others: Path | str | None) -> None:
    """Said before the run, and not after hours; a file that is read, or kept for later, is not written over."""
    if path.is_dir():
        raise ValueError(message("output", "a file", f"the folder {path}"))
    if path.exists() and not path.is_file():  # it would be replaced
        raise ValueError(message("output", "a file", f"{path}, a device or a pipe", "Give the name of a file."))
    if not path.absolute().parent.is_dir():
        raise ValueError(
            message("output", "in a folder that exists", str(path), f"Make {path.absolute().parent} first.")
        )
    if any(path.resolve() == Path(other).resolve() for other in others if other is not None):
        raise ValueError(message("output", "a file of its own", f"{path}, which is given for something else as well"))
