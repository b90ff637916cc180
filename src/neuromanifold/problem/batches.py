"""A batch of data: inputs for the model, perhaps labels; how its tensors are moved, sliced and listed.

tensor                 model(tensor)
(inputs, labels)       model(inputs), model(*inputs) where inputs is a tuple, model(**inputs) where it is a dict
{..., "labels": y}     model(**rest)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuromanifold.core.checks import message
from neuromanifold.problem.fingerprint import fingerprint

T = TypeVar("T")
_DTYPE = attrgetter("dtype")
_SMALL = 64  # numbers of a tensor that are compared


class Batch(NamedTuple):
    """Arguments for the model, and labels, which the model does not get."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    number: int = 0  # in the data

    def inputs(self) -> list[Tensor]:
        """All tensors among the arguments."""
        given = [*self.args, *self.kwargs.values()]
        return given if {*map(type, given)} == {Tensor} else tensors_in((self.args, self.kwargs))

    def to(self, device: torch.device) -> Batch:
        """Move all tensors, and all objects that have a `to` of their own, to a device."""
        move = partial(_moved, device=device)
        kwargs = {key: move(value) for key, value in self.kwargs.items()} if self.kwargs else {}
        labels = None if self.labels is None else move(self.labels)
        return Batch(tuple(map(move, self.args)), kwargs, labels, self.number)

    def copied(self) -> Batch:
        """Copy all tensors, arrays and objects that hold some: models may work in place on them, and are run twice."""

        def copied(value: Any) -> Any:
            return _copy(value) if isinstance(value, Tensor) else map_tensors(_copy, value, _is_object)

        return self._replace(args=tuple(map(copied, self.args)), kwargs=copied(self.kwargs) if self.kwargs else {})

    def cut(self, samples: int, rows: slice | Tensor, batch_dim: int = 0) -> Batch:
        """Return some of its samples; tensors in which samples cannot be found stay as they are."""
        labels, dim = self.labels, None if self.labels is None else _labels_dim(self.labels, samples, batch_dim)
        labels = labels if labels is None or dim is None else _slice(labels, dim, rows)
        return Batch(*cut((self.args, self.kwargs), samples, rows, batch_dim), labels, self.number)


class SomeSamples(NamedTuple):
    """Some samples of a batch, given by their indices, before they are cut out of it."""

    batch: Batch
    samples: int  # how many the batch has
    rows: Tensor  # indices of these samples

    def taken(self, batch_dim: int = 0) -> Taken:
        """Cut them out of their batch."""
        dims = dims_of(self.batch, self.samples, batch_dim)
        return Taken(self.batch.cut(self.samples, self.rows, batch_dim), dims)


class Taken(NamedTuple):
    """Samples that were cut out of a batch."""

    batch: Batch
    dims: list[int | None]  # of each tensor that which holds the samples; sizes of a few samples would not show it

    def only(self, rows: Tensor) -> Batch:
        """Some of these samples."""
        dims = iter(self.dims)

        def slice_of(tensor: Tensor) -> Tensor:
            dim = next(dims)
            return tensor if dim is None else _slice(tensor, dim, rows)

        args, kwargs, labels = map_tensors(slice_of, _contents(self.batch))
        return Batch(args, kwargs, labels, self.batch.number)


def gather(parts: list[Taken]) -> Batch:
    """Join samples of batches of the same kind; tensors in which samples cannot be found are those of the first."""
    first, dims = parts[0]
    if len(parts) == 1:
        return first
    found = iter(zip(zip(*(tensors_in(_contents(part.batch)) for part in parts), strict=True), dims, strict=True))

    def join(_: Tensor) -> Tensor:
        tensors, dim = next(found)
        return tensors[0] if dim is None else torch.cat(tensors, dim)

    args, kwargs, labels = map_tensors(join, _contents(first))
    return Batch(args, kwargs, labels, first.number)


def dims_of(batch: Batch, samples: int, batch_dim: int = 0) -> list[int | None]:
    """Which dimension of each tensor holds the samples."""
    return [dim for _, dim in _tensors_and_dims(batch, samples, batch_dim)]


def kind_of(batch: Batch, samples: int, batch_dim: int = 0) -> object:
    """A value that is equal for batches whose samples can be joined: the same shapes, types, and other contents."""
    others = map_tensors(lambda _: ..., _contents(batch))
    kinds: list[object] = [repr(others), fingerprint(("", others))]  # an array's repr leaves out most of its numbers
    for tensor, dim in _tensors_and_dims(batch, samples, batch_dim):
        shape = [size for d, size in enumerate(tensor.shape) if d != dim]
        own = None if dim is not None else tensor.flatten().tolist() if tensor.numel() <= _SMALL else id(tensor)
        kinds.append((dim, *shape, tensor.dtype, tensor.device, repr(own)))
    return tuple(kinds)


def _contents(batch: Batch) -> tuple[Any, ...]:
    return batch.args, batch.kwargs, batch.labels


def _tensors_and_dims(batch: Batch, samples: int, batch_dim: int) -> list[tuple[Tensor, int | None]]:
    """All tensors of a batch in the order of `map_tensors`, each with the dimension that holds the samples."""
    found = [(tensor, sample_dim(tensor, samples, batch_dim)) for tensor in batch.inputs()]
    if batch.labels is not None:
        found.append((batch.labels, _labels_dim(batch.labels, samples, batch_dim)))
    return found


def _labels_dim(labels: Tensor, samples: int, batch_dim: int) -> int | None:
    if not labels.ndim:
        return None
    return batch_dim if labels.ndim > batch_dim and labels.shape[batch_dim] == samples else 0


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        try:
            return deepcopy(value)
        except Exception:  # open files, locks, tensors with a graph
            return value
    own = value.detach().clone()
    return own.requires_grad_() if value.requires_grad else own


def _is_object(value: object) -> bool:
    """Whether this is an array, a graph, a cache, ...: neither a container that is gone into, nor part of a model."""
    if isinstance(value, np.ndarray):
        return True
    other = (Tensor, nn.Module, Mapping, tuple, list, type, partial, FunctionType, MethodType)
    if isinstance(value, other) or is_dataclass(value) or not hasattr(value, "__dict__"):
        return False
    return not any(isinstance(entry, nn.Module) for entry in vars(value).values())


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if _moves_itself(value):
        return value.to(device)
    return map_tensors(partial(_moved, device=device), value, _moves_itself)


def _moves_itself(value: object) -> bool:
    """Whether this is a PackedSequence, a BatchEncoding, a graph, ..."""
    return not isinstance(value, (Tensor, nn.Module)) and callable(getattr(value, "to", None))


def read_batch(item: object, number: int, label_key: str = "labels", argument: str | None = None) -> Batch:
    """Split an item of the data into arguments for the model and labels.

    A dict holds keyword arguments; but if `argument` names the only argument of the model, and no key is that name, the
    dict itself is the argument.
    """

    def as_batch(inputs: object, labels: object) -> Batch:
        if labels is not None and not isinstance(labels, Tensor):
            advice = "Leave them out if no single output has a label of its own (as in object detection)."
            raise TypeError(where + message("labels", "a tensor", type(labels).__name__, advice))
        if isinstance(inputs, Mapping):
            one = argument is not None and argument not in inputs
            return Batch((inputs,) if one else (), {} if one else dict(inputs), labels, number)
        return Batch(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, labels, number)

    where = f"Batch {number} of `data`: "
    if isinstance(item, Tensor):
        return as_batch(item, None)
    if isinstance(item, Mapping):
        inputs = dict(item)
        labels = inputs.pop(label_key, None)
        return as_batch(inputs, labels)
    if isinstance(item, (tuple, list)) and len(item) in (1, 2):
        return as_batch(item[0], item[1] if len(item) == 2 else None)
    got, advice = type(item).__name__, ""
    if isinstance(item, (tuple, list)):
        got += f" of length {len(item)}"
        advice = "Drop what is neither input nor label: data = [(x, y) for x, y, *_ in loader]. "
        advice += "Several inputs go into a tuple of their own: ((a, b), labels)."
    expected = f"a tensor, a tuple (inputs, labels) or a dict with the labels under {label_key!r}"
    raise TypeError(where + message("batch", expected, got, advice))


def map_tensors(function: Callable[[Any], Any], value: T, is_leaf: Callable[[Any], bool] = lambda _: False) -> T:
    """A copy of `value` with each tensor replaced by `function(tensor)`, in containers and dataclasses of any kind.

    `is_leaf` says what else is given to the function as it is.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor) or is_leaf(x):
            return function(x)
        if isinstance(x, MutableMapping):  # one that torch does not know, such as a BatchEncoding
            x = copy(x)
            x.update({key: map_tensors(function, entry, is_leaf) for key, entry in x.items()})
        elif is_dataclass(x) and not isinstance(x, type):
            x = copy(x)
            for field in fields(x):
                object.__setattr__(x, field.name, map_tensors(function, getattr(x, field.name), is_leaf))
        return x

    return tree_map(leaf, value, is_leaf=is_leaf)  # type: ignore[no-any-return]


def tensors_in(value: object) -> list[Tensor]:
    """All tensors of a batch, or of another container."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def cut(value: T, samples: int, rows: slice | Tensor, batch_dim: int = 0) -> T:
    """Some of the samples of inputs: slices each tensor in which `sample_dim` finds them; others stay as they are."""

    def slice_of(tensor: Tensor) -> Tensor:
        dim = sample_dim(tensor, samples, batch_dim)
        return tensor if dim is None else _slice(tensor, dim, rows)

    return map_tensors(slice_of, value)


def _slice(tensor: Tensor, dim: int, rows: slice | Tensor) -> Tensor:
    if isinstance(rows, Tensor):
        return tensor.index_select(dim, rows.to(tensor.device))
    return tensor[(slice(None),) * dim + (rows,)]


def sample_dim(tensor: Tensor, samples: int, batch_dim: int = 0) -> int | None:
    """Which dimension holds the samples: `batch_dim` if there are three or more, else the first; None if neither fits.

    That is a guess: a table may be as long by chance.
    """
    dims = (batch_dim, 0) if tensor.ndim > 2 else (0, batch_dim)
    return next((dim for dim in dims if dim < tensor.ndim and tensor.shape[dim] == samples), None)


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def dtypes_in_use(parameters: Iterable[Tensor], device: torch.device) -> set[torch.dtype]:
    """The dtypes that a model computes in: those of its parameters, and that of autocast where it is on."""
    autocast = {torch.get_autocast_dtype(device.type)} if torch.is_autocast_enabled(device.type) else set()
    return {*map(_DTYPE, parameters), *autocast}
