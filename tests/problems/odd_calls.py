"""Networks that call a module, or use a parameter, in an odd way or in several places."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.problems.problem import Net, Problem


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T.square() + self.bias


def called_in_odd_ways(labels: Tensor) -> dict[str, Problem]:
    """One module or one parameter, used in several places."""

    def shared() -> Net:
        net = Net(lambda m, x: m.b(torch.tanh(m.a(torch.tanh(x)))), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
        net.b.weight = net.a.weight
        return net

    def lengths(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.layer(x)).sum(1) + m.layer(x[:, :2]).sum(1) + m.layer(x[:, 0]))

    def masked(m: Net, x: Tensor) -> Tensor:
        some = x[:, 0] > 0
        z = x.new_zeros(len(x), 4)
        z[some] = torch.tanh(m.layer(x[some]))
        return m.head(z)

    def kept_weight(m: Net, x: Tensor) -> Tensor:
        with parametrize.cached():
            return m.head(torch.tanh(m.layer(x) @ m.layer.weight))

    def parametrized(layer: nn.Module, by: nn.Module) -> nn.Module:
        parametrize.register_parametrization(layer, "weight", by)
        return layer

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
        "weight norm": Problem(norm_of(nn.utils.parametrizations.weight_norm), three(), labels),
        "weight norm, one for all": Problem(
            norm_of(lambda layer: nn.utils.parametrizations.weight_norm(layer, dim=None)), three(), labels
        ),
        "weight norm, called twice": Problem(
            Net(
                lambda m, x: m.head(torch.tanh(m.layer(torch.tanh(m.layer(x))))),
                layer=nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, bias=False), dim=1),
                head=nn.Linear(3, 3),
            ),
            three(),
            labels,
        ),
        "weight norm of a convolution": Problem(
            Net(
                lambda m, x: m.head(m.conv(x).tanh().mean(-1)),
                conv=nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3, padding=1, groups=2), dim=2),
                head=nn.Linear(4, 3),
            ),
            torch.randn(4, 2, 5),
            labels,
        ),
        "weight norm of a bias": Problem(
            norm_of(lambda layer: nn.utils.parametrizations.weight_norm(layer, name="bias", dim=0)), three(), labels
        ),
        "a computed weight, kept for a while": Problem(
            Net(kept_weight, layer=nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), head=nn.Linear(3, 3)),
            three(),
            labels,
            rest=("layer.parametrizations.*",),
        ),
        "a weight computed from half of its parameters": Problem(
            norm_of(lambda layer: parametrized(layer, Half())), three(), labels
        ),
        "orthogonal weights": Problem(norm_of(nn.utils.parametrizations.orthogonal), three(), labels),
        "spectral norm": Problem(norm_of(nn.utils.parametrizations.spectral_norm), three(), labels),
        "a computed weight used elsewhere": Problem(
            Net(
                lambda m, x: m.head(torch.tanh(m.layer(x)) + m.layer.weight.sum(1)),
                layer=nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
                head=nn.Linear(4, 3),
            ),
            three(),
            labels,
            rest=("layer.parametrizations.*",),
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


class Half(nn.Module):
    """Of two originals, only the first is used."""

    def forward(self, used: Tensor, unused: Tensor) -> Tensor:
        del unused
        return torch.sin(used)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight, weight[:1]


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
