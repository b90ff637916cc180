"""The options that several commands have: which model, which data, which parameters, and how to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any

import typer

from neuromanifold.cli.console import note
from neuromanifold.cli.parsing import parse_likelihood
from neuromanifold.core import Categorical
from neuromanifold.core.checks import message, one_of
from neuromanifold.diagnostics.forecast import largest_batch
from neuromanifold.hf import FunctionData, LoadedData, LoadedModel, Task, check_data_source, load_data, load_model
from neuromanifold.hf.columns import USUAL
from neuromanifold.hf.functions import is_function_name
from neuromanifold.hf.models import DTYPES
from neuromanifold.problem.model import select_parameters

_SIZE = "32"  # rows in a batch, by default
_SHIFTS = {"auto": None, "yes": True, "no": False}


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Return a typer option with its panel of the help page; without names, that of the parameter is used."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_model, _data, _estimate, run_option = (partial(option, panel) for panel in ("Model", "Data", "Estimate", "Run"))

EstimatorName = Annotated[
    str,
    _estimate(
        "Hutchinson (unbiased, one backward pass per batch), Exact (classes - 1 passes), MonteCarlo, Empirical, "
        "SquaredBatchGradient, Adaptive; with settings as in 'Hutchinson(probes=4)'.",
        "--estimator", "-e", metavar="NAME",
    ),
]  # fmt: skip
GranularityName = Annotated[
    str,
    _estimate(
        "auto: per-sample gradients are squared wherever possible; sample: always; batch: those of whole batches."
    ),
]
Labels = Annotated[
    bool | None, _data("Require labels, or ignore them. Default: use them if there are any.", "--labels/--no-labels")
]
NoProgress = Annotated[bool, run_option("Disable the progress bar.", "--no-progress")]
Patterns = Annotated[
    list[str] | None,
    _model(
        "Only parameters whose names match, such as 'encoder.*'. Repeatable.", "--parameters", "-p", metavar="PATTERN"
    ),
]
Device = Annotated[str, _model("auto (a GPU if there is one), cpu, cuda, cuda:1 or mps.")]


@dataclass(frozen=True)
class Setup:
    """A model, data for it, and the parameters of interest, as options of a command."""

    model: Annotated[
        str,
        _model(
            "A folder (config.json, *.safetensors), a name on the Hugging Face hub, or package.module:function, where "
            "the function returns a torch module.",
            "--model", "-m", metavar="MODEL",
        ),
    ]  # fmt: skip
    data: Annotated[
        str,
        _data(
            "A CSV, TSV, JSON, JSONL, Parquet or NPZ file; a folder with a folder of images or audio files for each "
            "class; a data set's name on the hub; or package.module:function, where the function returns batches.",
            "--data", "-d", metavar="DATA",
        ),
    ]  # fmt: skip
    task: Annotated[
        str | None, _model(f"What the model predicts: {', '.join(Task)}. Default: according to its config.")
    ] = None
    adapter: Annotated[
        str | None,
        _model("A PEFT adapter (folder or hub name), whose parameters alone are then used.", metavar="ADAPTER"),
    ] = None
    classes: Annotated[
        int | None,
        _model("Initialize a classifier with N classes, for a checkpoint without a trained one.", metavar="N", min=1),
    ] = None
    processor: Annotated[
        str | None,
        _model("Folder of tokenizer, image processor or feature extractor. Default: the model's.", metavar="FOLDER"),
    ] = None
    revision: Annotated[str | None, _model("Branch, tag or commit on the hub.", metavar="REV")] = None
    dtype: Annotated[
        str | None,
        _model(f"Precision of the model: {', '.join(DTYPES)}. Default: float32; a function's module as it is."),
    ] = None
    device: Device = "auto"
    parameters: Patterns = None
    likelihood: Annotated[
        str | None,
        _model(
            "categorical, bernoulli (several labels) or gaussian (regression). Default: according to the model's "
            "config, else categorical."
        ),
    ] = None
    split: Annotated[str, _data("Split of a hub data set.")] = "train"
    subset: Annotated[str | None, _data("Configuration of a hub data set, such as sst2 of glue.")] = None
    columns: Annotated[
        str | None,
        _data(
            f"Columns by role, such as text=body,label=stars. Roles: {', '.join(USUAL)}. Common names are recognized.",
            metavar="ROLE=COLUMN,...",
        ),
    ] = None
    batch_size: Annotated[
        str, _data("Rows in a batch; auto: the largest that fits and helps.", "--batch-size", "-b", metavar="N|auto")
    ] = _SIZE
    batches: Annotated[
        int | None,
        _data("Number of batches, of rows in random order. Default: all.", "--batches", "-n", metavar="N", min=1),
    ] = None
    max_length: Annotated[
        int | None, _data("Truncate text to N tokens (default: at most 512), audio to N samples.", metavar="N", min=1)
    ] = None
    shift_labels: Annotated[
        str,
        _data(
            "Whether position t predicts token t + 1, so that label t + 1 belongs to it. auto: as the model does.",
            metavar="|".join(_SHIFTS),
        ),
    ] = "auto"
    mask: Annotated[float, _data("Share of masked tokens, for masked language models.")] = 0.15
    seed: Annotated[int, run_option("Random seed of rows, probes and a new classifier.", metavar="N", min=0)] = 0

    @property
    def size(self) -> int | None:
        """The batch size; None for "auto"."""
        if self.batch_size == "auto":
            return None
        if not self.batch_size.isdigit() or not int(self.batch_size):
            raise ValueError(message("batch-size", "a number of rows, or auto", repr(self.batch_size)))
        return int(self.batch_size)

    def load_model(self, fixed_size: str = "") -> LoadedModel:
        """Load the model onto its device, after the options that need no model are checked.

        `fixed_size` names what a batch size "auto" does not go together with.
        """
        check_data_source(self.data, self.split, self.subset, self.columns)
        parse_likelihood(self.likelihood, Categorical)
        if self.size is None and fixed_size:
            advice = "neuromanifold forecast -b auto finds one."
            raise ValueError(message("batch-size", f"a number with {fixed_size}", "auto", advice))
        if is_function_name(self.data) and self.batch_size != _SIZE:
            expected, advice = "left out where --data is a function", "The function returns whole batches."
            raise ValueError(message("batch-size", expected, self.batch_size, advice))
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

    def load_data(self, model: LoadedModel, labels: bool | None, **run: Any) -> LoadedData | FunctionData:
        """Load the data; for "auto" in the largest batches that fit into a run with these arguments and speed it up."""
        if self.size is None:
            every = replace(self, batch_size="1", batches=None).load_data(model, labels)
            assert isinstance(every, LoadedData)  # functions are refused before
            size = largest_batch(model.module, every.with_batch_size, most=every.samples, **run)
            note(f"Batch size: {size}")
            return replace(self, batch_size=str(size)).load_data(model, labels)
        return load_data(
            self.data,
            model,
            split=self.split,
            subset=self.subset,
            columns=self.columns,
            labels=labels,
            batch_size=self.size,
            batches=self.batches,
            max_length=self.max_length,
            mask=self.mask,
            seed=self.seed,
        )

    def selection(self, model: LoadedModel) -> dict[str, Any]:
        """Return the arguments `likelihood`, `parameters` and `shift_labels` that every run takes.

        Labels that are made from a table for a causal model stand at their own token, whatever the model's class.
        """
        likelihood = parse_likelihood(self.likelihood, model.likelihood)
        made = model.task is Task.CAUSAL and not is_function_name(self.data)
        given = _SHIFTS[one_of(self.shift_labels, "--shift-labels", *_SHIFTS)]
        shift = made or "auto" if given is None else given
        return {"likelihood": likelihood, "parameters": self.parameters or None, "shift_labels": shift}


def with_setup(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its first argument, a `Setup`, as options of its own."""
    shared = inspect.signature(Setup, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared.values(), *own)]

    @wraps(command)
    def run(**values: Any) -> None:
        command(Setup(**{name: values.pop(name) for name in shared}), **values)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in options}
    return run
