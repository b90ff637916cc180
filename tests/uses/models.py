"""Small models for the tests of uses: a network, and models of transformers from tiny configurations."""

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm


def network(width: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def inputs(seed: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, generator=generator, dtype=dtype) for n in (5, 1, 4)]


def diagonal(model: nn.Module, seed: int = 1) -> nm.DiagonalFisher:
    dtype = next(model.parameters()).dtype
    return nm.fisher_diagonal(model, inputs(seed, dtype), nm.Exact())


def moved(model: nn.Module, by: float = 0.1, seed: int = 2) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return model


def bert(seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=3, **sizes)
    model: nn.Module = transformers.BertForSequenceClassification(config).eval()
    return model


def tokens(count: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(0, 30, (4, 6), generator=generator)} for _ in range(count)]
