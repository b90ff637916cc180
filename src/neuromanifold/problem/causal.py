"""Causal language models: the logits at position t predict token t + 1, so labels and masks of tokens are shifted."""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.model import base_model, unwrapped

ShiftLabels = bool | Literal["auto"]

# Classes of transformers whose loss compares the logits at position t with label t + 1.
# XLNet, XLM and Flaubert do not.
_CAUSAL = re.compile(r"^(?!XLNet).*(ForCausalLM|(?<!With)LMHeadModel|ModelWithLMHead|ForConditionalGeneration)$")


def check_shift_labels(value: ShiftLabels) -> ShiftLabels:
    """The argument, if it is one of the three."""
    if not (isinstance(value, bool) or value == "auto"):
        expected = "'auto' (if the model shifts labels itself), True or False"
        raise ValueError(message("shift_labels", expected, repr(value)))
    return value


def shifts_labels(model: nn.Module) -> bool:
    """Whether this is a causal language model of transformers, whose own loss shifts labels by one.

    Wrappers (`torch.compile`, data parallel, PEFT) are looked into.  Encoder–decoder models do not shift labels: their
    decoder's inputs are the labels shifted already.  Neither do decoders of such models on their own (BartForCausalLM),
    which are told by their `decoder_start_token_id`.
    """
    model = base_model(model)
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", True):
        return False
    if getattr(config, "decoder_start_token_id", None) is not None:
        return False
    return any(_CAUSAL.match(one.__name__) for one in type(model).__mro__)


def virtual_tokens(model: nn.Module) -> int:
    """How many positions a trained prompt of PEFT puts before the inputs; prefixes of keys and values have none."""
    config = getattr(unwrapped(model), "active_peft_config", None)
    if config is None or not getattr(config, "is_prompt_learning", False):
        return 0
    return 0 if "PREFIX" in str(config.peft_type) else int(config.num_virtual_tokens or 0)


def next_labels(labels: Tensor, fill: int) -> Tensor:
    """Labels [B, T] of tokens as those of positions: label t + 1 at position t, and `fill` at the last one."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), fill)], 1)


def has_next(tokens: Tensor, position_ids: object) -> Tensor:
    """Which positions [B, T] predict a token: both t and t + 1 are tokens (and no padding) of the same document.

    A document begins where `position_ids` do not increase, as in packed sequences.
    """
    valid = tokens & next_labels(tokens, 0)
    if isinstance(position_ids, Tensor) and position_ids.shape in (tokens.shape, (1, tokens.shape[1])):
        valid = valid & (next_labels(position_ids, 0) > position_ids)
    return valid
