"""Small models and data for `nm.check`: a right one, and one for each thing that it must see."""

import torch
from torch import Tensor, nn
from torch.nn import functional

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(96, 4, generator=GENERATOR)
Y = torch.randint(0, 5, (96,), generator=GENERATOR)
DATA = list(zip(X.split(16), Y.split(16), strict=True))


def network(classes: int = 5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes))


class DropsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.layer(x), training=True)


class MixesSamples(DropsAlways):
    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z - z.mean(0)


class NeedsFour(DropsAlways):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            raise RuntimeError("four at least")
        return self.layer(x)


class HasATable(DropsAlways):
    """An input without a dimension for the samples."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.layer(x) + table.sum(0)


class Computed(nn.Module):
    """A layer whose weight is computed from other parameters, which no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.direction = nn.Parameter(torch.randn(5, 1)), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.direction * self.scale.exp())


def computed(classes: int) -> nn.Module:
    return nn.Sequential(Computed(), nn.Tanh(), nn.Linear(5, classes))


class UsedTwice(nn.Module):
    """A layer whose weight is used outside of it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight.square().sum()


class Force(nn.Module):
    """The gradient of an energy, whose last bias is the only parameter that it does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.energy = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(self.body(x).tanh()).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]
