"""Layers as data: every family with a rule, on the shapes and with the options in which rules go wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A module in float64 and the shape of its input, without the samples; `rows`: inputs are numbers below it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int = 0
    rtol: float = 1e-10

    def module(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = self.make().double().eval()
            for parameter in module.parameters():
                nn.init.normal_(parameter, 0.5)
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point():
                    buffer.uniform_(0.5, 2) if "var" in name else buffer.normal_()
        return module

    def input(self, samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(samples)
        if self.rows:
            return torch.randint(0, self.rows, (samples, *self.shape), generator=generator)
        return torch.randn(samples, *self.shape, generator=generator, dtype=torch.float64)


def _linear() -> dict[str, Layer]:
    extra = [(), (3,), (2, 3), (2, 1, 3), (0,)]
    return {
        **{f"Linear, {len(dims)} dims {list(dims)}": Layer(lambda: nn.Linear(4, 5), (*dims, 4)) for dims in extra},
        "Linear, no bias": Layer(lambda: nn.Linear(4, 5, bias=False), (3, 4)),
        "Linear, one to one": Layer(lambda: nn.Linear(1, 1), (1,)),
        "Linear, more positions than features": Layer(lambda: nn.Linear(2, 3), (17, 2)),
    }


def _convolutions() -> dict[str, Layer]:
    return {
        "Conv1d": Layer(lambda: nn.Conv1d(3, 4, 3), (3, 7)),
        "Conv1d, 1x1": Layer(lambda: nn.Conv1d(3, 4, 1, bias=False), (3, 5)),
        "Conv1d, one position": Layer(lambda: nn.Conv1d(3, 4, 5), (3, 5)),
        "Conv1d, stride leaves a rest": Layer(lambda: nn.Conv1d(2, 3, 3, stride=3), (2, 10)),
        "Conv1d, same, even kernel": Layer(lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 6)),
        "Conv1d, extra dimension": Layer(lambda: nn.Conv1d(2, 3, 3), (2, 2, 5)),
        "Conv2d, all at once": Layer(lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (1, 2), groups=2), (4, 7, 5)),
        "Conv2d, depthwise": Layer(lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3), (3, 4, 5)),
        "Conv2d, valid": Layer(lambda: nn.Conv2d(2, 3, (1, 3), padding="valid"), (2, 4, 5)),
        "Conv2d, same, dilated": Layer(lambda: nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(2, 3)), (2, 6, 7)),
        **{
            f"Conv2d, {mode}": Layer(lambda mode=mode: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode=mode), (2, 4, 5))
            for mode in ("reflect", "replicate", "circular")
        },
        "Conv2d, same, circular, even": Layer(
            lambda: nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="circular"), (2, 5, 6)
        ),
        "Conv3d": Layer(lambda: nn.Conv3d(2, 3, (2, 3, 1), (1, 2, 1), (1, 0, 2)), (2, 3, 5, 2)),
        "Conv3d, replicate, groups": Layer(
            lambda: nn.Conv3d(2, 4, 2, padding=1, groups=2, padding_mode="replicate"), (2, 3, 2, 3)
        ),
        "ConvTranspose1d": Layer(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1), (3, 5)),
        "ConvTranspose1d, output padding": Layer(
            lambda: nn.ConvTranspose1d(2, 3, 3, stride=3, padding=1, output_padding=2, dilation=2), (2, 4)
        ),
        "ConvTranspose2d": Layer(
            lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 3), (1, 0), output_padding=(1, 2), bias=False), (2, 3, 4)
        ),
        "ConvTranspose2d, groups": Layer(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), (4, 3, 2)),
        "ConvTranspose2d, depthwise": Layer(lambda: nn.ConvTranspose2d(3, 3, 2, groups=3), (3, 3, 2)),
        "ConvTranspose3d": Layer(
            lambda: nn.ConvTranspose3d(2, 3, (1, 2, 3), stride=(2, 1, 2), padding=(0, 1, 0)), (2, 2, 3, 2)
        ),
    }


def _embeddings() -> dict[str, Layer]:
    return {
        "Embedding, ids repeat": Layer(lambda: nn.Embedding(3, 4), (7,), rows=3),
        "Embedding, one id": Layer(lambda: nn.Embedding(5, 2), (), rows=5),
        "Embedding, two dims": Layer(lambda: nn.Embedding(5, 2), (2, 3), rows=5),
        "Embedding, padding": Layer(lambda: nn.Embedding(4, 3, padding_idx=1), (6,), rows=4),
        "Embedding, sparse": Layer(lambda: nn.Embedding(5, 3, sparse=True), (4,), rows=5),
        "Embedding, most rows unused": Layer(lambda: nn.Embedding(50, 3), (4,), rows=6),
    }


def _norms() -> dict[str, Layer]:
    return {
        "LayerNorm": Layer(lambda: nn.LayerNorm(5), (5,)),
        "LayerNorm, positions": Layer(lambda: nn.LayerNorm(5, eps=0.1), (3, 5)),
        "LayerNorm, several dims": Layer(lambda: nn.LayerNorm((2, 3)), (4, 2, 3)),
        "LayerNorm, no bias": Layer(lambda: nn.LayerNorm(5, bias=False), (3, 5)),
        "RMSNorm": Layer(lambda: nn.RMSNorm(5), (3, 5)),
        "RMSNorm, several dims, epsilon": Layer(lambda: nn.RMSNorm((2, 3), eps=0.1), (2, 2, 3)),
        "GroupNorm": Layer(lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
        "GroupNorm, no positions": Layer(lambda: nn.GroupNorm(2, 6), (6,)),
        "InstanceNorm1d": Layer(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
        "InstanceNorm2d, tracked": Layer(
            lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 4, 2)
        ),
        "InstanceNorm3d": Layer(lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 3, 2)),
        "BatchNorm1d": Layer(lambda: nn.BatchNorm1d(4), (4,)),
        "BatchNorm1d, positions": Layer(lambda: nn.BatchNorm1d(4, eps=0.1), (4, 3)),
        "BatchNorm2d": Layer(lambda: nn.BatchNorm2d(3), (3, 2, 4)),
        "BatchNorm3d": Layer(lambda: nn.BatchNorm3d(2), (2, 2, 3, 2)),
        "PReLU, one parameter": Layer(nn.PReLU, (3, 4)),
        "PReLU, channels": Layer(lambda: nn.PReLU(3), (3, 4, 2)),
        "PReLU, channels, no positions": Layer(lambda: nn.PReLU(3), (3,)),
    }


def _hugging_face() -> dict[str, Layer]:
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm
    from transformers.pytorch_utils import Conv1D

    return {
        "Conv1D": Layer(lambda: Conv1D(5, 4), (3, 4)),
        "Conv1D, no positions": Layer(lambda: Conv1D(5, 4), (4,)),
        "LlamaRMSNorm": Layer(lambda: LlamaRMSNorm(5), (3, 5)),
        "LlamaRMSNorm, heads": Layer(lambda: LlamaRMSNorm(3), (3, 3, 3)),
        "T5LayerNorm": Layer(lambda: T5LayerNorm(5), (3, 5)),
        "GemmaRMSNorm": Layer(lambda: GemmaRMSNorm(5), (3, 5), rtol=1e-5),  # works in float32 whatever it gets
        "ConvNextLayerNorm, channels last": Layer(lambda: ConvNextLayerNorm(5), (2, 3, 5)),
        "ConvNextLayerNorm, channels first": Layer(
            lambda: ConvNextLayerNorm(4, data_format="channels_first"), (4, 4, 4)
        ),
    }


LAYERS = {**_linear(), **_convolutions(), **_embeddings(), **_norms(), **_hugging_face()}
