"""Small networks as data: every kind of module that a Fisher information must be right for, with readable names.

The odd ones are in `odd_calls.py` and `odd_tensors.py`, those of torch's own blocks in `torch_blocks.py`, models of a
real library in `architectures.py`.
"""

import torch
from torch import Tensor, nn

import neuromanifold as nm
from tests.problems.odd_calls import called_in_odd_ways
from tests.problems.odd_tensors import in_place, shared_by_the_samples
from tests.problems.problem import Net, Problem, in_float64
from tests.problems.torch_blocks import torch_blocks


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
            **called_in_odd_ways(labels),
            **in_place(labels),
            **shared_by_the_samples(labels),
            **torch_blocks(labels),
        }
    return in_float64(problems)


PROBLEMS = make_problems()
