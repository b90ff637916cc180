"""The weights of a model that a result has values for, as matrices: a row for each output, a column for each input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.model import base_model, plain_name
from neuromanifold.results import DiagonalFisher
from neuromanifold.uses.matching import finite_mean, finite_values, first_of, matched, parameters_of, selected

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = (  # ends of names of output projections
    "attention.output.dense.weight", "attention.out_lin.weight", "self_attn.o_proj.weight", "attn.c_proj.weight",
    "self_attn.out_proj.weight", "attention.o_proj.weight", "SelfAttention.o.weight",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, the module that owns it, and its Fisher information per sample."""

    name: str  # in the result
    module: nn.Module
    attribute: str
    fisher: Tensor  # float32 or better, on the parameter's device; empty where there is no result
    transposed: bool = False  # inputs come first, as in Conv1D of GPT-2

    @property
    def parameter(self) -> Tensor:
        """The parameter's values now, without a graph."""
        values: Tensor = getattr(self.module, self.attribute).detach()
        return values

    def matrix(self, values: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as [outputs, inputs · positions], positions of a kernel first."""
        values = values.transpose(0, 1) if self.transposed else values
        return values.movedim(1, -1).flatten(1) if values.ndim > 1 else values[:, None]  # [o, k..., i]

    def restored(self, matrix: Tensor) -> Tensor:
        """Return a matrix as a tensor of the parameter's shape: the inverse of `matrix`."""
        shape = self.parameter.transpose(0, 1).shape if self.transposed else self.parameter.shape
        if len(shape) == 1:
            return matrix[:, 0]
        values = matrix.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        return values.transpose(0, 1) if self.transposed else values

    @property
    def inputs(self) -> int:
        """The number of inputs of an output, without the positions of a kernel."""
        return self.parameter.shape[0 if self.transposed else 1]


def weights_of(model: nn.Module, fim: DiagonalFisher, parameters: str | Sequence[str] | None) -> list[Weight]:
    """Return the parameters that match; by default those with two or more dimensions that are no embeddings."""
    parameters_of(model)
    names = matched(fim, dict(model.named_parameters()))
    found = []
    for name in list(names) if parameters is None else selected(list(names), parameters):
        weight = _weight(model, name, names[name], fim)
        single = weight.parameter.ndim < 2 or isinstance(weight.module, nn.Embedding | nn.EmbeddingBag)
        if parameters is not None or not single:
            finite_values(weight.parameter, name)
            found.append(weight)
    if not found:
        expected = "a result with weights of two dimensions or more, other than embeddings"
        raise ValueError(message("fim", expected, f"{', '.join(list(fim)[:3])}", "Name others with parameters=."))
    return found


def weights_named(model: nn.Module, names: Sequence[str]) -> list[Weight]:
    """Return parameters by the names that results have for them; what the model lacks is an error."""
    there = {plain_name(name): name for name, _ in model.named_parameters()}
    if missing := [f"{name} is missing" for name in names if plain_name(name) not in there]:
        raise ValueError(message("model", "the model that the plan was made for", first_of(missing)))
    return [_weight(model, name, there[plain_name(name)], None) for name in names]


def _weight(model: nn.Module, name: str, path: str, fim: DiagonalFisher | None) -> Weight:
    owner, _, attribute = path.rpartition(".")
    module = model.get_submodule(owner)
    values: Tensor = getattr(module, attribute)
    transposed = isinstance(module, _TRANSPOSED) or type(module).__name__ == "Conv1D"
    fisher = torch.empty(0) if fim is None else finite_mean(fim, name).to(values.device)
    return Weight(name, module, attribute, fisher, transposed and values.ndim > 1)


def attention_outputs(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return the output projections of attention, by name, with their number of heads."""
    found = {}
    config = getattr(base_model(model), "config", None)
    heads = next((int(n) for key in ("num_attention_heads", "n_heads", "n_head", "num_heads")
                  if isinstance(n := getattr(config, key, None), int)), 0)  # fmt: skip
    for name in names:
        if heads and plain_name(name).endswith(_ATTENTION):
            found[name] = heads
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            plain = plain_name(f"{path}.out_proj.weight".lstrip("."))
            found |= {name: module.num_heads for name in names if plain_name(name) == plain}
    return found
