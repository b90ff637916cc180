"""Recurrent networks: modules and loops over cells, in both directions, packed or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from tests.zoo.case import Case, Kind, Maker
from tests.zoo.families_ragged import lengths

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def network(m: Maker, **more: Any) -> tuple[nn.Module, int]:
    """A recurrent module, and the width of its output."""
    both, kind_of = m.pick("bidirectional", False, True), m.pick("kind", nn.LSTM, nn.GRU, nn.RNN)
    layers = m.pick("layers", 1, 2)
    extra = {"proj_size": 1} if kind_of is nn.LSTM and m.pick("projected", False, False, True) and m.d > 1 else {}
    width = extra.get("proj_size", m.d) * (2 if both else 1)
    return kind_of(m.d, m.d, layers, bidirectional=both, **extra, **more), width


@kind
def whole_sequences(m: Maker) -> Case:
    first, read = m.pick("batch_first", True, False), m.pick("read", "last", "mean", "state")
    net, width = network(m, batch_first=first)

    def run(n: Any, x: Tensor) -> Tensor:
        z, state = n.net(x if first else x.transpose(0, 1))
        z = z if first else z.transpose(0, 1)
        hidden = state[0] if isinstance(state, tuple) else state
        if read == "state":
            return n.g(hidden[-1])
        return n.h(z[:, -1] if read == "last" else z.mean(1))

    state_width = getattr(net, "proj_size", 0) or m.d
    return m.case(run, m.inputs(m.t, m.d), {"net": net, "h": m.head(width), "g": m.head(state_width)})


@kind
def packed_sequences(m: Maker) -> Case:
    net, width = network(m, batch_first=True)

    def run(n: Any, x: Tensor, count: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, count, batch_first=True, enforce_sorted=False)
        z, _ = rnn.pad_packed_sequence(n.net(packed)[0], batch_first=True)
        return n.h(z.sum(1))

    inputs = [(m.randn(len(one), int(one.max()), m.d), one) for one in lengths(m)]
    return m.case(run, inputs, {"net": net, "h": m.head(width)})


@kind
def loops_over_cells(m: Maker) -> Case:
    which = m.pick("cell", nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    state_from = m.pick("state", "zeros", "parameter", "input")

    def run(n: Any, x: Tensor) -> Tensor:
        size = len(x)
        start = {"zeros": x.new_zeros(size, x.shape[2]), "parameter": n.s.expand(size, -1), "input": x[:, 0]}[
            state_from
        ]
        state: Any = (start, start * 0.5) if which is nn.LSTMCell else start
        for t in range(x.shape[1]):
            state = n.cell(x[:, t], state)
        return n.h(state[0] if which is nn.LSTMCell else state)

    return m.case(run, m.inputs(m.t, m.d), {"cell": which(m.d, m.d), "s": m.parameter(m.d), "h": m.head()})


@kind
def loops_over_layers(m: Maker) -> Case:
    """Written by hand: a layer called as often as there are steps, more often in later batches."""

    def run(n: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), x.shape[2])
        for t in range(x.shape[1]):
            state = torch.tanh(n.a(x[:, t]) + n.b(state)) * (1 - n.gate(state).sigmoid())
        return n.h(state)

    inputs = [m.randn(size, m.t + i, m.d) for i, size in enumerate(m.spec.sizes)]
    return m.case(
        run, inputs, {"a": nn.Linear(m.d, m.d), "b": nn.Linear(m.d, m.d), "gate": nn.Linear(m.d, 1), "h": m.head()}
    )


@kind
def learned_initial_state(m: Maker) -> Case:
    net = nn.GRU(m.d, m.d, batch_first=True)

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(n.net(x, n.s.expand(1, len(x), -1).contiguous())[0][:, -1])

    return m.case(run, m.inputs(m.t, m.d), {"net": net, "s": m.parameter(1, 1, m.d), "h": m.head()})


@kind
def without_a_batch(m: Maker) -> Case:
    """Sequences one by one: recurrent modules take [T, d] as well."""
    net = m.pick("net", nn.LSTM, nn.GRU)(m.d, m.d)

    def run(n: Any, x: Tensor) -> Tensor:
        return n.h(torch.stack([n.net(row)[0][-1] for row in x]))

    return m.case(run, m.inputs(m.t, m.d), {"net": net, "h": m.head()})
