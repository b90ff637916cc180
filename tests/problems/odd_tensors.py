"""Networks that overwrite, view or cut outputs, or have parameters and positions that all samples share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.problems.problem import Net, Problem


def in_place(labels: Tensor) -> dict[str, Problem]:
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


def shared_by_the_samples(labels: Tensor) -> dict[str, Problem]:
    """Parameters and positions that are the same for every sample of a batch."""

    def scale(m: Net, x: Tensor) -> Tensor:
        return m.head((x + m.gamma.view(1, -1, 1, 1) * torch.tanh(m.conv(x))).mean((2, 3)) * m.beta)

    def token(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.layer(torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.table)).mean(1))

    def query(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(x + m.layer(m.query)).mean(1))

    def ids(*shape: int) -> Callable[[Net, Tensor], Tensor]:
        def forward(m: Net, x: Tensor) -> Tensor:
            positions = torch.arange(3, device=x.device).view(shape)
            return m.head(torch.tanh(m.layer(x) + m.table(positions)).mean(1))

        return forward

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


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))
