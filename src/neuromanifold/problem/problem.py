"""A model, its parameters, data and likelihood: everything that a Fisher information is asked about.

problem = Problem.of(model, data, ...)                     wrong arguments raise an error here
with problem.session():
    for batch in problem.batches():                        on the model's device
        outputs = problem.evaluate(batch)                  logits [B, ..., C], labels, which positions count
        core, labels = problem.distributions(outputs, validation)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from neuromanifold.core import Categorical
from neuromanifold.core.checks import integer_in_range, is_readable, message, warn
from neuromanifold.estimators import Estimator
from neuromanifold.problem import suspicions
from neuromanifold.problem.batches import Batch, read_batch
from neuromanifold.problem.cotangents import Distributions, LateValidation, Likelihood, distributions
from neuromanifold.problem.model import (
    Selection,
    ShiftLabels,
    as_module,
    base_model,
    call,
    check_shift_labels,
    check_whole,
    forward_signature,
    is_sharded,
    is_tensor_parallel,
    only_argument,
    reshard,
    select_parameters,
    shifts_labels,
    virtual_tokens,
    with_decoder_inputs,
    without_ddp,
)
from neuromanifold.problem.outputs import Outputs, read_outputs
from neuromanifold.problem.progress import tracked
from neuromanifold.problem.repeated import RepeatedBatches
from neuromanifold.problem.unchanged import unchanged


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its parameters, data and likelihood; make one with `Problem.of`, which checks the arguments."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]  # those chosen, by plain name
    data: Iterable[object]
    likelihood: Likelihood = Categorical
    class_dim: int = -1
    batch_dim: int = 0
    ignore_index: int = -100
    label_key: str = "labels"
    shift_labels: ShiftLabels = "auto"
    warned: set[str] = field(default_factory=set)  # what has been warned of in this call

    @classmethod
    def of(
        cls,
        model: nn.Module | Callable[..., Any],
        data: Iterable[object],
        likelihood: Likelihood = Categorical,
        parameters: Selection | Mapping[str, Tensor] = None,
        class_dim: int = -1,
        batch_dim: int = 0,
        ignore_index: int = -100,
        label_key: str = "labels",
        shift_labels: ShiftLabels = "auto",
        *,
        shards: bool = False,
    ) -> Problem:
        """Check all arguments that can be checked without a batch; they are those of `nm.fisher_diagonal`.

        `model` may be a function of (parameters, *inputs) if `parameters` is a dict of its tensors.
        `shards`: it may be in FSDP2 or tensor parallel, with parameters that are divided among processes.
        """
        model = without_ddp(model) if isinstance(model, nn.Module) else model
        module = as_module(model, parameters)
        reshard(module)
        chosen = select_parameters(module, parameters if module is model else None)  # type: ignore[arg-type]
        check_whole(module, chosen, shards=shards)
        _check_device(chosen)
        _check_embeddings(module)
        _check_data(data)
        if not callable(likelihood):
            expected = "nm.Categorical, nm.Bernoulli, nm.Gaussian, or a function from outputs to one of them"
            raise TypeError(message("likelihood", expected, repr(likelihood)))
        class_dim = integer_in_range(class_dim, "class_dim", -64, 63, "a dimension of the logits")
        batch_dim = integer_in_range(batch_dim, "batch_dim", 0, 63, "a dimension of the logits, counted from the front")
        ignore_index = integer_in_range(ignore_index, "ignore_index", -(2**63), 2**63 - 1, "a label")
        if not isinstance(label_key, str):
            raise TypeError(message("label_key", "the key of the labels in a batch", repr(label_key)))
        shift = check_shift_labels(shift_labels)
        return cls(module, chosen, data, likelihood, class_dim, batch_dim, ignore_index, label_key, shift)

    @cached_property
    def sharded(self) -> bool:
        """Whether FSDP2 or tensor parallelism has divided the parameters among processes."""
        return is_sharded(self.model) or self.tensor_parallel

    @cached_property
    def tensor_parallel(self) -> bool:
        """Whether all processes are one replica, each with a part of the parameters."""
        return is_tensor_parallel(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model is; batches are moved there."""
        return self._first.device

    @cached_property
    def _first(self) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return next((parameter for parameter in parameters if parameter.device.type != "meta"), parameters[0])

    @cached_property
    def _signature(self) -> Signature | None:
        return forward_signature(self.model)

    @cached_property
    def predicts_next(self) -> bool:
        """Whether position t predicts token t + 1: labels and masks are then shifted by one."""
        return shifts_labels(self.model) if self.shift_labels == "auto" else self.shift_labels

    @cached_property
    def _virtual_tokens(self) -> int:
        return virtual_tokens(self.model)

    @cached_property
    def _argument(self) -> str | None:
        return only_argument(self._signature)

    def takes(self, argument: str) -> bool:
        """Whether the model's `forward`, inside of all wrappers, has an argument of this name."""
        return self._base_signature is not None and argument in self._base_signature.parameters

    @cached_property
    def _base_signature(self) -> Signature | None:
        return forward_signature(base_model(self.model))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep the model in eval mode, with gradients on, and leave everything as it was found.

        The model's CUDA device is current, and compiled modules run eagerly, since a compiled graph has no modules.
        """
        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(unchanged(self.model))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                yield
            except RuntimeError as error:
                if "use_reentrant" not in str(error):
                    raise
                advice = "Use use_reentrant=False; in transformers: model.gradient_checkpointing_enable("
                advice += "gradient_checkpointing_kwargs={'use_reentrant': False})."
                got = "one whose gradients cannot be taken with respect to single tensors"
                expected = "without reentrant activation checkpointing"
                raise ValueError(message("model", expected, got, advice)) from error

    def items(self, *, progress: bool = False, description: str = "Fisher information") -> Iterator[object]:
        """Go through the data once, perhaps with a progress bar; `read` makes batches of the items."""
        return iter(tracked(self.data, description) if progress else self.data)

    def read(self, item: object, number: int) -> Batch:
        """Make a batch on the model's device from an item of the data."""
        batch = read_batch(item, number, self.label_key, self._argument)
        return with_decoder_inputs(batch, self.model, self._signature, self.ignore_index).to(self.device)

    def batches(self, *, progress: bool = False, description: str = "Fisher information") -> Iterator[Batch]:
        """Go through the data once."""
        for number, item in enumerate(self.items(progress=progress, description=description)):
            yield self.read(item, number)

    def repeated(self) -> RepeatedBatches:
        """An iterable for several passes, which raises an error if the batches of a later pass differ."""
        return RepeatedBatches(self)

    def evaluate(self, batch: Batch, estimator: Estimator | None = None) -> Outputs:
        """Run the model on a copy of a batch; with an `estimator` that uses labels, the batch must have some."""
        if estimator is not None and estimator.needs_labels and batch.labels is None:
            keys = f" under {self.label_key!r} (keys: {', '.join(batch.kwargs)})" if batch.kwargs else ""
            advice = "Yield (inputs, labels), or a dict and its label_key, or choose an estimator without labels."
            text = message("labels", f"given for {estimator}", f"none{keys}", advice)
            raise ValueError(f"Batch {batch.number} of `data`: {text}")
        inputs = batch.copied()
        if self.takes("use_cache"):  # keys and values for generation, with which transformers does not see packing
            inputs.kwargs.setdefault("use_cache", False)
        output = call(self.model, inputs, self._signature, self.label_key)
        outputs = self._read_outputs(output, batch, self.class_dim)
        if torch.is_grad_enabled() and not outputs.logits.requires_grad:
            advice = "Look for torch.no_grad(), .detach() or a non-differentiable step in its forward, or for adapters "
            advice += "that are merged into frozen weights (unmerge them)."
            raise ValueError(message("model", "differentiable", "logits that do not depend on any parameter", advice))
        # An estimator that uses labels raises an error for wrong ones; otherwise they only say which positions count.
        counted = self.likelihood is Categorical and (estimator is None or not estimator.needs_labels)
        if counted and outputs.labels is not None and is_readable(outputs.labels):
            self._inspect_labels(outputs, outputs.logits.shape[-1])
        return outputs

    def outputs(self, batch: Batch, estimator: Estimator | None = None) -> Outputs:
        """Run the model for its outputs alone, without an autograd graph."""
        try:
            with torch.no_grad():
                return self.evaluate(batch, estimator)
        except RuntimeError:  # perhaps forward takes derivatives itself
            return self.evaluate(batch, estimator).detached()

    def samples_of(self, batch: Batch, like: Outputs | None = None) -> int:
        """The number of samples of a batch whose outputs are not known, but perhaps those of another."""
        for tensor in batch.inputs():
            if tensor.ndim:
                return tensor.shape[self.batch_dim if tensor.ndim > max(2, self.batch_dim) else 0]
        return 1 if like is None else len(like.logits)

    def outputs_like(self, outputs: Outputs, batch: Batch, samples: int) -> Outputs:
        """Return outputs of a batch of which only some samples were evaluated: right but for the logits' values.

        These are those of the first sample, which may not count, and are zero where it has no possible class.
        """
        first = outputs.logits[:1]
        logits = torch.where(first.isfinite().any(-1, keepdim=True), first, 0).expand(samples, *first.shape[1:])
        logits = logits.movedim(0, self.batch_dim) if logits.ndim > 2 else logits
        return self._read_outputs(logits, batch, -1)

    def _read_outputs(self, output: object, batch: Batch, class_dim: int) -> Outputs:
        scalar, shift, virtual = self.likelihood is not Categorical, self.predicts_next, self._virtual_tokens
        return read_outputs(output, batch, class_dim, self.ignore_index, self.batch_dim, scalar, shift, virtual)

    def validation(self) -> LateValidation:
        """Return a checker of outputs, for one pass over the data: `flush` it at the end."""
        return LateValidation(self.likelihood)

    def distributions(
        self, outputs: Outputs, validation: LateValidation | None = None, *, labels: bool = True, compact: bool = False
    ) -> Distributions:
        """The core of the positions that count, and their labels.

        Without a `validation` the outputs are checked at once.  `compact` drops ignored samples of logits [B, C] too,
        which waits for a GPU.
        """
        late = validation or self.validation()
        made = distributions(outputs, late, labels=labels, compact=compact)
        if validation is None:
            late.flush()
        return made

    def inspect(self, batch: Batch, outputs: Outputs) -> bool:
        """Warn of outputs and labels that look wrong, and of samples that influence each other.

        For the first batch of a call, in a session: it takes forward passes of three samples, and waits for a GPU.
        Of a model that all processes must run together, only the outputs are looked at.
        Returns whether the batch has at least two samples that count: else a later one has more to say.
        """
        if not len(outputs.logits):
            return False
        core = distributions(outputs, LateValidation(self.likelihood), compact=True).core
        self._inspect_labels(outputs, core.dim if isinstance(core, Categorical) else None)
        if self.sharded:
            note = suspicions.probabilities_note(core) or suspicions.token_labels_note(self, batch)
            if note:
                warn(note, suspicions.SuspiciousInputWarning)
            return True
        shift = suspicions.token_labels_note(self, batch) or suspicions.shift_note(self, batch, outputs)
        found = suspicions.probabilities_note(core), shift, suspicions.order_note(self, batch, outputs)
        for note in filter(None, found):
            warn(note, suspicions.SuspiciousInputWarning)
        if note := suspicions.mixing_note(self, batch, outputs):
            warn(note, suspicions.SamplesMixWarning)
        return len(outputs.logits) > 1 and bool(outputs.samples > 1)

    def _inspect_labels(self, outputs: Outputs, classes: int | None) -> None:
        """Warn once of labels that look wrong: on a CPU, where looking costs nothing, they are those of every batch."""
        if "labels" not in self.warned and (note := suspicions.labels_note(outputs, classes, self.ignore_index)):
            self.warned.add("labels")
            warn(note, suspicions.SuspiciousInputWarning)


def _check_device(parameters: Mapping[str, Tensor]) -> None:
    """Refuse Apple's GPUs: probabilities, norms and sums of fourth powers need float64, which they do not have."""
    if any(parameter.device.type == "mps" for parameter in parameters.values()):
        raise ValueError(message("model", "on a device with float64", "one on mps", 'Move it with model.to("cpu").'))


def _check_embeddings(model: nn.Module) -> None:
    """Refuse options of embeddings that change weights in a forward pass, or make gradients that are no derivatives."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            advice = "It overwrites weights in the forward pass. Apply it once to the weights, then set it to None."
            raise ValueError(message("model", "without max_norm", f"max_norm={module.max_norm} at {name!r}", advice))
        if module.scale_grad_by_freq:
            advice = "Such gradients are not derivatives. Set it to False; it has no effect on outputs."
            got = f"scale_grad_by_freq=True at {name!r}"
            raise ValueError(message("model", "without scale_grad_by_freq", got, advice))


def _check_data(data: object) -> None:
    """Refuse what is easily handed in instead of an iterable of batches."""
    one_batch = isinstance(data, Tensor) or (isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data))
    if one_batch or isinstance(data, Mapping):
        raise TypeError(message("data", "an iterable of batches", "a single batch", "Put it into a list: [batch]."))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        advice = "Wrap it: DataLoader(dataset, batch_size=64)."
        raise TypeError(message("data", "an iterable of batches", "a Dataset of single samples", advice))
    if not isinstance(data, Iterable):
        raise TypeError(message("data", "an iterable of batches", type(data).__name__))


def sampler_replicas(data: object) -> int:
    """Among how many processes a DataLoader's sampler divides the samples; 1 where it does not."""
    for sampler in (getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)):
        replicas = getattr(sampler, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            return replicas
    return 1


def refuse_a_part(data: object, what: str) -> None:
    """Refuse data that a sampler divides among processes where each process would go on with its part alone."""
    if sampler_replicas(data) > 1:
        sharing = "fisher_diagonal, fisher_trace and fisher_kronecker"
        advice = f"Leave out the DistributedSampler; {sharing} share the data among processes."
        got = f"a part of them, by a DistributedSampler for {sampler_replicas(data)} processes"
        raise ValueError(message("data", f"whole for {what}, which runs on a single process", got, advice))
