"""Networks made of torch's own attention, transformers and recurrent nets."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.problems.problem import Net, Problem


def torch_blocks(labels: Tensor) -> dict[str, Problem]:
    """Attention, transformers and recurrent nets of torch's own."""

    def cell(m: Net, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return m.head(m.point(h))

    def cells(m: Net, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(m.point(state[0]))

    def cross(m: Net, x: Tensor) -> Tensor:
        return m.head(m.attention(m.layer(x[:, :2]), x, x, need_weights=False)[0].mean(1))

    def encoder(**options: Any) -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, **options)

    tokens = lambda: torch.randn(4, 3, 4)  # noqa: E731
    mean = lambda m, x: m.head(m.layer(x).mean(1))  # noqa: E731
    head = lambda: nn.Linear(4, 3)  # noqa: E731
    small = lambda: {"point": nn.Linear(3, 3), "head": nn.Linear(3, 3)}  # noqa: E731
    first = {"batch_dim": 1}
    layer = nn.TransformerEncoderLayer(4, 2, 5)
    return {
        "GRU": Problem(
            Net(lambda m, x: m.head(m.gru(x)[0].mean(1)), gru=nn.GRU(4, 4, 2, batch_first=True), head=head()),
            tokens(),
            labels,
            rest=("gru.*",),
        ),
        "RNNCell": Problem(Net(cell, cell=nn.RNNCell(4, 3), **small()), tokens(), labels, rest=("cell.*",)),
        "LSTMCell": Problem(Net(cells, cell=nn.LSTMCell(4, 3), **small()), tokens(), labels, rest=("cell.*",)),
        "self-attention": Problem(
            Net(
                lambda m, x: m.head(m.a(x, x, x)[0].mean(1)),
                a=nn.MultiheadAttention(4, 2, batch_first=True),
                head=head(),
            ),
            tokens(),
            labels,
        ),
        "cross-attention": Problem(
            Net(cross, attention=nn.MultiheadAttention(4, 2, batch_first=True), layer=nn.Linear(4, 4), head=head()),
            tokens(),
            labels,
            rest=("attention.in_proj*",),
        ),
        "encoder layer, norm first": Problem(Net(mean, layer=encoder(norm_first=True), head=head()), tokens(), labels),
        "decoder layer": Problem(
            Net(
                lambda m, x: m.head(m.layer(x[:, :2], x).mean(1)),
                layer=nn.TransformerDecoderLayer(4, 2, 5, batch_first=True),
                head=head(),
            ),
            tokens(),
            labels,
            rest=("layer.multihead_attn.in_proj*",),
        ),
        "time first": Problem(
            Net(lambda m, x: m.head(torch.tanh(m.layer(x)).sum(0)), layer=nn.Linear(4, 4), head=head()),
            torch.randn(3, 4, 4),
            labels,
            options=first,
        ),
        "time first, tokens": Problem(
            Net(
                lambda m, x: m.head(torch.tanh(m.norm(m.layer(x)))),
                layer=nn.Linear(4, 4),
                norm=nn.LayerNorm(4),
                head=head(),
            ),
            torch.randn(3, 4, 4),
            torch.randint(0, 3, (3, 4)),
            options=first,
        ),
        "time first, LSTM": Problem(
            Net(lambda m, x: m.head(m.lstm(m.layer(x))[0][-1]), lstm=nn.LSTM(4, 4), layer=nn.Linear(4, 4), head=head()),
            torch.randn(3, 4, 4),
            labels,
            options=first,
            rest=("lstm.*",),
        ),
        "time first, transformer": Problem(
            Net(
                lambda m, x: m.head(m.body(x)[0]),
                body=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                head=head(),
            ),
            torch.randn(3, 4, 4),
            labels,
            options=first,
        ),
    }
