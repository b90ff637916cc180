"""Small networks as data: every kind of module that a Fisher information must be right for, with readable names.

Models of a real library are in `architectures.py`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import neuromanifold as nm


@dataclass
class Problem:
    """A model in float64, a batch of four samples as the data would yield it, and what the outputs mean."""

    model: nn.Module
    inputs: Any  # a tensor, or a dict of keyword arguments
    labels: Tensor
    likelihood: Callable[[Tensor], nm.Core] = nm.Categorical
    options: dict[str, Any] = field(default_factory=dict)  # for fisher_diagonal
    rest: tuple[str, ...] = ()  # patterns of the parameters that need not be done by samples; all others must be
    rtol: float = 1e-10  # some models work in float32 whatever they get

    @property
    def data(self) -> list[Any]:
        """Two batches, of three samples and of one."""
        return [self._part(slice(0, 3)), self._part(slice(3, 4))]

    def _part(self, rows: slice) -> Any:
        cut, labels = self._cut(self.inputs, rows), self._cut(self.labels, rows)
        return {**cut, "labels": labels} if isinstance(cut, dict) else (cut, labels)

    def _cut(self, inputs: Any, rows: slice) -> Any:
        if isinstance(inputs, dict):
            return {key: self._cut(value, rows) for key, value in inputs.items()}
        return inputs[:, rows] if self.options.get("batch_dim") and inputs.ndim > 1 else inputs[rows]

    def forward(self, model: nn.Module) -> Tensor:
        """Logits [B, ..., C] of all samples, evaluated batch by batch."""
        parts = [self._cut(self.inputs, rows) for rows in (slice(0, 3), slice(3, 4))]
        return torch.cat([self._logits(model(**part) if isinstance(part, dict) else model(part)) for part in parts])

    def _logits(self, output: Any) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output
        logits = logits["logits"] if isinstance(logits, dict) else logits
        logits = logits[0] if isinstance(logits, tuple) else logits
        logits = logits.movedim(self.options.get("class_dim", -1), -1)
        return logits.movedim(1, 0) if self.options.get("batch_dim") and logits.ndim > 2 else logits

    @property
    def labels_by_sample(self) -> Tensor:
        """[B, ...]."""
        return self.labels.movedim(1, 0) if self.options.get("batch_dim") and self.labels.ndim > 1 else self.labels

    def by_rule(self, name: str) -> bool:
        """Whether a parameter must be done by a rule, sample by sample."""
        return not any(fnmatch(name, pattern) for pattern in self.rest)


class Net(nn.Module):
    """Named parts, and a function of them and of the input."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.run(self, *args, **options)


class ConvWithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu_().mean((-2, -1)))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth, self.point = nn.Conv1d(3, 6, 3, groups=3, padding=1), nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(torch.tanh(self.depth(x))).amax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.head(self.lstm(x)[0][:, -1]), "a second output"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


class Tied(nn.Module):
    """One matrix as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(ids)).sum(1))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, features: dict[str, Tensor], scale: Tensor) -> Tensor:
        return (self.a(features["left"]) + torch.sigmoid(self.b(features["right"]))) * scale


class FrozenAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T.square() + self.bias


def _called_in_odd_ways(labels: Tensor) -> dict[str, Problem]:
    """One module or one parameter, used in several places."""

    def shared() -> Net:
        net = Net(lambda m, x: m.b(torch.tanh(m.a(torch.tanh(x)))), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
        net.b.weight = net.a.weight
        return net

    def lengths(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.layer(x)).sum(1) + m.layer(x[:, :2]).sum(1) + m.layer(x[:, 0]))

    def masked(m: Net, x: Tensor) -> Tensor:
        some = x[:, 0] > 0
        z = torch.zeros(len(x), 4, dtype=x.dtype)
        z[some] = torch.tanh(m.layer(x[some]))
        return m.head(z)

    def norm_of(kind: Any) -> Net:
        return Net(lambda m, x: m.head(torch.tanh(m.layer(x))), layer=kind(nn.Linear(3, 4)), head=nn.Linear(4, 3))

    def hooked() -> Net:
        net = norm_of(lambda layer: layer)
        net.layer.register_forward_hook(lambda _, __, y: 2 * y.relu_())
        net.layer.register_forward_pre_hook(lambda _, x: (x[0] + 1,))
        return net

    def only_biases() -> Net:
        net = Net(lambda m, x: m.b(torch.tanh(m.a(x)).mean(-1)), a=nn.Conv1d(2, 3, 2), b=nn.Linear(3, 3))
        net.a.weight.requires_grad_(False)
        net.b.weight.requires_grad_(False)
        return net

    def twice(m: Net, x: Tensor) -> Tensor:
        return m.head(functional.linear(torch.tanh(m.layer(x)), m.layer.weight))

    three = lambda: torch.randn(4, 3)  # noqa: E731
    tokens = lambda: torch.randn(4, 3, 3)  # noqa: E731
    layers = lambda: {"layer": nn.Linear(3, 3), "head": nn.Linear(3, 3)}  # noqa: E731
    return {
        "a weight shared by two modules": Problem(shared(), three(), labels),
        "a module called on several lengths": Problem(Net(lengths, **layers()), tokens(), labels),
        "a weight used by a function as well": Problem(Net(twice, **layers()), three(), labels),
        "flattened positions": Problem(
            Net(lambda m, x: m.head(torch.tanh(m.layer(x.flatten(0, 1))).view_as(x).sum(1)), **layers()),
            tokens(),
            labels,
        ),
        "flattened positions, time first": Problem(
            Net(
                lambda m, x: m.head(torch.tanh(m.layer(x.transpose(0, 1).flatten(0, 1))).view(3, -1, 3).sum(0)),
                **layers(),
            ),
            tokens(),
            labels,
        ),
        "time first inside": Problem(
            Net(lambda m, x: m.head(torch.tanh(m.layer(x.transpose(0, 1))).sum(0)), **layers()),
            tokens(),
            labels,
        ),
        "a module called on some of the samples": Problem(
            Net(masked, layer=nn.Linear(3, 4), head=nn.Linear(4, 3)), three(), labels, rest=("layer.*",)
        ),
        "a forward of its own": Problem(norm_of(lambda _: OwnForward(3, 4)), three(), labels, rest=("layer.weight",)),
        "under no_grad": Problem(Net(_no_grad, frozen=nn.Linear(3, 3), head=nn.Linear(3, 3)), three(), labels),
        "weight norm": Problem(
            norm_of(nn.utils.parametrizations.weight_norm), three(), labels, rest=("layer.parametrizations.*",)
        ),
        "weight norm, old": Problem(OldWeightNorm(), three(), labels, rest=("layer.weight_*",)),
        "user hooks": Problem(hooked(), three(), labels),
        "only biases": Problem(only_biases(), torch.randn(4, 2, 4), labels),
        "samples mixed by BatchNorm": Problem(
            Net(
                lambda m, x: m.head(m.norm(m.conv(x)).tanh().mean(-1)),
                conv=nn.Conv1d(2, 3, 2),
                norm=nn.BatchNorm1d(3, track_running_stats=False),
                head=nn.Linear(3, 3),
            ),
            torch.randn(4, 2, 4),
            labels,
            rest=("conv.*", "norm.*"),
        ),
        "checkpointed": Problem(
            Net(
                lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)),
                body=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4)),
                head=nn.Linear(4, 3),
            ),
            three(),
            labels,
        ),
    }


def _no_grad(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.frozen(x)
    return m.head(torch.tanh(y)) + m.frozen(x).detach()


class OldWeightNorm(nn.Module):
    """By a hook that makes the weight anew before each call; it cannot be copied, so it is made anew."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer, self.head = nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "OldWeightNorm":
        made = OldWeightNorm().to(self.head.weight.dtype)
        made.load_state_dict(self.state_dict())
        return made


def _in_place(labels: Tensor) -> dict[str, Problem]:
    """Outputs that are overwritten, viewed, cut."""

    def residual(m: Net, x: Tensor) -> Tensor:
        y = m.conv(x)
        y += x
        y = m.norm(y)
        y += m.conv2(torch.relu_(y.clone()))
        return m.head(functional.relu(y, inplace=True).mean(-1))

    def erased(m: Net, x: Tensor) -> Tensor:
        y = m.layer(x)
        y[:, 0] = 0
        y[:, 1].mul_(2)
        return m.head(torch.tanh(y))

    def cut(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(len(x), -1, 2, 6).transpose(1, 2).chunk(3, -1)
        return m.head(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    relu = nn.ReLU(inplace=True)
    conv = {"conv": nn.Conv1d(3, 3, 3, padding=1), "conv2": nn.Conv1d(3, 3, 1), "norm": nn.BatchNorm1d(3)}
    return {
        "in-place ReLUs": Problem(
            nn.Sequential(nn.Linear(3, 5), relu, nn.Linear(5, 4), nn.BatchNorm1d(4), relu, nn.Linear(4, 3)),
            torch.randn(4, 3),
            labels,
        ),
        "in-place residuals": Problem(Net(residual, **conv, head=nn.Linear(3, 3)), torch.randn(4, 3, 4), labels),
        "a part of the output erased": Problem(
            Net(erased, layer=nn.Linear(3, 4), head=nn.Linear(4, 3)), torch.randn(4, 3), labels
        ),
        "attention by hand": Problem(
            Net(cut, qkv=nn.Linear(3, 12), head=nn.Linear(4, 3)), torch.randn(4, 3, 3), labels
        ),
    }


def _shared_by_the_samples(labels: Tensor) -> dict[str, Problem]:
    """Parameters and positions that are the same for every sample of a batch."""

    def scale(m: Net, x: Tensor) -> Tensor:
        return m.head((x + m.gamma.view(1, -1, 1, 1) * torch.tanh(m.conv(x))).mean((2, 3)) * m.beta)

    def token(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.layer(torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.table)).mean(1))

    def query(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(x + m.layer(m.query)).mean(1))

    def ids(*shape: int) -> Callable[[Net, Tensor], Tensor]:
        return lambda m, x: m.head(torch.tanh(m.layer(x) + m.table(torch.arange(3).view(shape))).mean(1))

    tokens = lambda: torch.randn(4, 3, 2)  # noqa: E731
    parts = lambda: {"layer": nn.Linear(2, 2), "head": nn.Linear(2, 3)}  # noqa: E731
    return {
        "layer scale": Problem(
            Net(scale, gamma=_parameter(2), beta=_parameter(2), conv=nn.Conv2d(2, 2, 1), head=nn.Linear(2, 3)),
            torch.randn(4, 2, 2, 3),
            labels,
        ),
        "class token and position table": Problem(
            Net(token, token=_parameter(1, 1, 2), table=_parameter(1, 4, 2), **parts()), tokens(), labels
        ),
        "a part of a position table": Problem(
            Net(
                lambda m, x: m.head(torch.tanh(m.layer(x + m.table[:, : x.shape[1]])).mean(1)),
                table=_parameter(1, 5, 2),
                **parts(),
            ),
            tokens(),
            labels,
        ),
        "position ids [1, T]": Problem(Net(ids(1, 3), table=nn.Embedding(5, 2), **parts()), tokens(), labels),
        "position ids [T]": Problem(Net(ids(3), table=nn.Embedding(5, 2), **parts()), tokens(), labels),
        "a module called on a parameter": Problem(
            Net(query, query=_parameter(1, 1, 3), layer=nn.Linear(3, 2), head=nn.Linear(2, 3)),
            tokens(),
            labels,
            rest=("query",),
        ),
    }


def _torch_blocks(labels: Tensor) -> dict[str, Problem]:
    """Attention, transformers and recurrent nets of torch's own."""

    def cell(m: Net, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 3, dtype=x.dtype)
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


def make_problems() -> dict[str, Problem]:
    """All problems, seeded, without touching the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.tensor([0, 2, 1, 1])
        features = {"features": {"left": torch.randn(4, 3), "right": torch.randn(4, 2)}, "scale": torch.rand(4, 1)}
        problems = {
            "MLP": Problem(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 5), labels),
            "CNN with BatchNorm": Problem(ConvWithBatchNorm(), torch.randn(4, 2, 5, 5), labels),
            "depthwise conv": Problem(Depthwise(), torch.randn(4, 3, 6), labels),
            "LSTM": Problem(Recurrent(), torch.randn(4, 5, 3), labels, rest=("lstm.*",)),
            "transformer encoder": Problem(Encoder(), torch.randn(4, 3, 4), labels),
            "tied embeddings": Problem(Tied(), torch.randint(0, 5, (4, 3)), labels),
            "a module called twice": Problem(CalledTwice(), torch.randn(4, 4), labels),
            "nested dict inputs": Problem(NestedInputs(), features, labels),
            "frozen and unused": Problem(FrozenAndUnused(), torch.randn(4, 3), labels),
            "two classes": Problem(nn.Linear(3, 2), torch.randn(4, 3), labels.clamp(max=1)),
            "segmentation, class_dim=1": Problem(
                nn.Conv2d(2, 3, 3, padding=1),
                torch.randn(4, 2, 2, 2),
                torch.randint(0, 3, (4, 2, 2)),
                options={"class_dim": 1},
            ),
            "multi-label": Problem(nn.Linear(3, 4), torch.randn(4, 3), torch.ones(4, 4), nm.Bernoulli),
            "regression": Problem(nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2), nm.Gaussian),
            "a dict of outputs": Problem(
                Net(lambda m, x: {"loss": None, "logits": m.layer(x)}, layer=nn.Linear(3, 3)), torch.randn(4, 3), labels
            ),
            **_called_in_odd_ways(labels),
            **_in_place(labels),
            **_shared_by_the_samples(labels),
            **_torch_blocks(labels),
        }
    return in_float64(problems)


def in_float64(problems: dict[str, Problem]) -> dict[str, Problem]:
    """The same in float64 and in training mode."""
    for problem in problems.values():
        problem.model.double().train()  # estimates must switch to eval by themselves, and back
        problem.inputs = _double(problem.inputs)
        if problem.labels.is_floating_point():
            problem.labels = problem.labels.double()
    return problems


def _double(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {key: _double(value) for key, value in inputs.items()}
    return inputs.double() if inputs.is_floating_point() else inputs


PROBLEMS = make_problems()
