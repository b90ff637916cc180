"""The tasks of the session on a GPU: architectures of `transformers` at full size, the same ones small, and wide ones.

Weights and inputs are random and made on the device: nothing is downloaded.  All models are in eval mode.  The small
ones have every kind of layer of the full ones, norms with random statistics, and tokens that repeat: a float64 loop
over samples and classes can say what is right.  Wide ones are as wide as the full ones, but have a layer of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import transformers as hf
from models import Task
from torch import Tensor, nn

PRECISIONS = ("fp32", "tf32", "bf16")  # in this order: the last one changes the model
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Size(NamedTuple):
    """Samples, classes, and the tokens of a sequence, the side of an image, or the samples of audio."""

    samples: int
    classes: int
    length: int


class Architecture(NamedTuple):
    """How to build a model and its inputs, small or not, from a size."""

    kind: str  # "transformer" or "convolutional"
    model: Callable[[Size, bool], nn.Module]
    inputs: Callable[[Size, nn.Module], dict[str, Tensor]]
    small: Size
    language: bool = False  # a label for each position


# ----------------------------------------------------------------------------------------------------- architectures


def _distilbert(size: Size, small: bool) -> nn.Module:
    sizes = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 2, "vocab_size": 20, "max_position_embeddings": 16}
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(num_labels=size.classes, **(sizes if small else {}))
    )


def _roberta(size: Size, small: bool) -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    sizes = {**sizes, "vocab_size": 20} if small else {}
    positions = {"max_position_embeddings": 20 if small else 514}
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(num_labels=size.classes, **sizes, **positions))


def _resnet(size: Size, small: bool) -> nn.Module:
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 1, 1, 1]} if small else {}
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=size.classes, **sizes))


def _efficientnet(size: Size, small: bool) -> nn.Module:
    """B0; small: a quarter of its width, all of its blocks.  Its own small weights would leave gradients of 1e-36."""
    scale = {"width_coefficient": 0.25, "hidden_dim": 320} if small else {"width_coefficient": 1.0, "hidden_dim": 1280}
    b0 = {"depth_coefficient": 1.0, "dropout_rate": 0.2, "image_size": size.length}
    model = hf.EfficientNetForImageClassification(hf.EfficientNetConfig(num_labels=size.classes, **scale, **b0))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


def _wav2vec2(size: Size, small: bool) -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    sizes = {**sizes, "conv_dim": [32] * 7, "classifier_proj_size": 32}
    sizes = {**sizes, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4} if small else {}
    return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(num_labels=size.classes, **sizes))


def _gpt2(size: Size, small: bool) -> nn.Module:
    sizes = {"n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 64, "bos_token_id": 0, "eos_token_id": 0}
    sizes = sizes if small else {}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=size.classes, use_cache=False, **sizes))


def _vit(size: Size, small: bool) -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    sizes = {**sizes, "patch_size": 16} if small else {}
    return hf.ViTForImageClassification(hf.ViTConfig(num_labels=size.classes, image_size=size.length, **sizes))


def _convnext(size: Size, small: bool) -> nn.Module:
    """Tiny.  Scales of layers begin at 1e-6, which would leave next to no gradient: here at 0.1, as after training."""
    sizes = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]} if small else {}
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(num_labels=size.classes, layer_scale_init_value=0.1, **sizes)
    )


def _deberta(size: Size, small: bool) -> nn.Module:
    """DeBERTa-v3-small: relative positions in buckets, whose projections are those of queries and keys."""
    sizes = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
    sizes |= {"vocab_size": 128100, "position_buckets": 256, "max_position_embeddings": 512}
    few = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    few |= {"vocab_size": 20, "position_buckets": 4, "max_position_embeddings": 16}
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "type_vocab_size": 0}
    more |= {"position_biased_input": False, "norm_rel_ebd": "layer_norm", "max_relative_positions": -1}
    config = hf.DebertaV2Config(num_labels=size.classes, **(few if small else sizes), **more)
    return hf.DebertaV2ForSequenceClassification(config)


def _wide_distilbert(size: Size, small: bool) -> nn.Module:
    del small
    return hf.DistilBertForSequenceClassification(hf.DistilBertConfig(num_labels=size.classes, n_layers=1))


def _wide_resnet(size: Size, small: bool) -> nn.Module:
    del small
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=size.classes, depths=[1, 1, 1, 1]))


def _ids(size: Size, model: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(5, model.config.vocab_size, (size.samples, size.length))}  # no special ones


def _image(size: Size, model: nn.Module) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size.samples, model.config.num_channels, size.length, size.length)}


def _audio(size: Size, model: nn.Module) -> dict[str, Tensor]:
    del model
    return {"input_values": torch.randn(size.samples, size.length)}


ARCHITECTURES = {
    "DistilBERT": Architecture("transformer", _distilbert, _ids, Size(3, 5, 12)),
    "RoBERTa": Architecture("transformer", _roberta, _ids, Size(3, 3, 12)),
    "ResNet-50": Architecture("convolutional", _resnet, _image, Size(3, 5, 64)),
    "EfficientNet-B0": Architecture("convolutional", _efficientnet, _image, Size(3, 5, 64)),
    "Wav2Vec2": Architecture("transformer", _wav2vec2, _audio, Size(3, 4, 3200)),
    "ViT-B/16": Architecture("transformer", _vit, _image, Size(3, 5, 32)),
    "ConvNeXt-tiny": Architecture("convolutional", _convnext, _image, Size(3, 5, 64)),
    "DeBERTa": Architecture("transformer", _deberta, _ids, Size(3, 5, 12)),
    "GPT-2": Architecture("transformer", _gpt2, _ids, Size(3, 16, 5), language=True),
}
WIDE = {
    "DistilBERT": Architecture("transformer", _wide_distilbert, _ids, Size(4, 3, 40)),
    "ResNet-50": Architecture("convolutional", _wide_resnet, _image, Size(3, 3, 64)),
}
TASKS = {
    "DistilBERT-2": ("DistilBERT", Size(64, 2, 128)),
    "DistilBERT-14": ("DistilBERT", Size(64, 14, 128)),
    "RoBERTa": ("RoBERTa", Size(64, 3, 128)),
    "ResNet-50": ("ResNet-50", Size(64, 100, 224)),
    "EfficientNet-B0": ("EfficientNet-B0", Size(64, 100, 224)),
    "ViT-B/16": ("ViT-B/16", Size(64, 100, 224)),
    "ConvNeXt-tiny": ("ConvNeXt-tiny", Size(64, 100, 224)),
    "DeBERTa": ("DeBERTa", Size(32, 3, 128)),
    "Wav2Vec2": ("Wav2Vec2", Size(64, 12, 16000)),
    "GPT-2": ("GPT-2", Size(8, 50257, 512)),
}


# -------------------------------------------------------------------------------------------------------------- tasks


def full_task(name: str, device: torch.device) -> Task:
    """Return a task at full size."""
    architecture, size = TASKS[name]
    return _task(ARCHITECTURES[architecture], size, device, small=False)


def small_task(architecture: str, device: torch.device) -> Task:
    """Return a few samples for a small version of an architecture."""
    return _task(ARCHITECTURES[architecture], ARCHITECTURES[architecture].small, device, small=True)


def wide_task(architecture: str, device: torch.device) -> Task:
    """Return a few samples for layers as wide as those of an architecture."""
    return _task(WIDE[architecture], WIDE[architecture].small, device, small=True)


def _task(architecture: Architecture, size: Size, device: torch.device, small: bool) -> Task:
    torch.manual_seed(0)
    with torch.device(device):
        model = (
            architecture.model(size, small).eval().to(device)
        )  # torch.Tensor(n) in Wav2Vec2 does not heed the `with`
        if small:
            _randomise(model)
        inputs = architecture.inputs(size, model)
        if not small:
            _calibrate(model, inputs)
        if small and not architecture.language:
            _temper(model, inputs, size.classes)
        shape = (size.samples, size.length) if architecture.language else (size.samples,)
        return Task(model, inputs, torch.randint(0, size.classes, shape), size.classes)


@torch.no_grad()
def _calibrate(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Statistics of BatchNorm from the data: with those of a fresh model, deep networks have gradients near zero."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        logits(model, {key: value[:16] for key, value in inputs.items()})
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Weights of the usual size instead of almost none, and norms that are not the identity."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
        elif type(module).__name__ == "Conv1D":  # GPT-2's linear layers, weight [in, out]
            nn.init.normal_(module.weight, std=1 / math.sqrt(len(module.weight)))
        elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)


@torch.no_grad()
def _temper(model: nn.Module, inputs: dict[str, Tensor], classes: int) -> None:
    """Logits of size one: a network with confident predictions has a Fisher information of rounding errors."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == classes]
    scale = logits(model, inputs).std()
    for parameter in head[-1].parameters():
        parameter /= scale


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """[B, C] or [B, T, C]."""
    return model(**inputs).logits


def parameters(model: nn.Module) -> int:
    """Return how many numbers the parameters are."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------- precision


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Whether matrix products and convolutions of float32 may use TF32; both as they were afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def in_precision(task: Task, name: str) -> Task:
    """Return the same task; in half precision its model is changed in place, and inputs that are no ids are rounded."""
    if name not in HALF:
        return task
    return task._replace(model=task.model.to(HALF[name]), inputs=cast_inputs(task.inputs, HALF[name]))


def cast_inputs(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point inputs in another type."""
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
