"""A model on any device, with batches from the CPU."""

import copy

import pytest
import torch

import neuromanifold as nm
from neuromanifold.problem.cotangents import LateValidation, cotangents
from neuromanifold.problem.outputs import Outputs
from tests.problems.networks import PROBLEMS
from tests.run.test_estimators import estimate

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ON_THE_CPU = ("MLP", "nested dict inputs", "LSTM")  # where nothing has to be moved


@pytest.mark.filterwarnings("ignore::neuromanifold.SlowPathWarning")
@pytest.mark.parametrize(
    ("device", "name"),
    [(device, name) for device in DEVICES for name in PROBLEMS if device != "cpu" or name in ON_THE_CPU],
)
def test_batches_are_moved_to_the_model(name: str, device: str) -> None:
    problem = PROBLEMS[name]
    model = copy.deepcopy(problem.model).to(device)
    options = {"likelihood": problem.likelihood, "reduction": "sum", **problem.options}
    exact = nm.fisher_diagonal(model, problem.data, nm.Exact(), **options)
    assert exact["".join(list(exact)[:1])].device.type == device
    by_kernel = device == "cuda" and "weight" in name  # torch's weight norm takes its square root in float32 there
    assert exact.to("cpu").compare(estimate(problem, nm.Exact())).mae < (1e-6 if by_kernel else 1e-12)
    many = nm.fisher_diagonal(model, problem.data, nm.Hutchinson(100, orthogonal=False), **options)
    for key, value in exact.items():
        assert ((many[key] - value).abs() <= 7 * many.stderr[key] + 1e-9 * value + 1e-20).all()
    again = nm.fisher_diagonal(model, problem.data, nm.Hutchinson(100, orthogonal=False), **options)
    assert many.compare(again).relmae_positive < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_bad_logits_name_their_batch_on_every_device(device: str) -> None:
    model = torch.nn.Linear(3, 2).to(device)
    bad = torch.full((4, 3), float("nan"))
    for data, number in (
        ([bad], 0),
        ([torch.ones(4, 3), bad, torch.ones(4, 3)], 1),
        ([torch.ones(4, 3)] * 2 + [bad], 2),
    ):
        with pytest.raises(ValueError, match=rf"Batch {number} of `data`: `logits`.*NaN"):
            nm.fisher_diagonal(model, data)


def test_late_validation_reads_a_batch_when_the_next_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, walked on a CPU."""
    validation = LateValidation(nm.Categorical)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("meta"))  # anything but "cpu"
    good, bad = torch.zeros(2, 3), torch.tensor([[0.0, float("nan"), 0.0]])
    masked = torch.tensor([[0.0, -torch.inf, 0.0]])
    validation.core(masked, 0)
    validation.core(bad, 1)
    with pytest.raises(ValueError, match=r"Batch 1 of `data`"):
        validation.core(good, 2)
    validation.flush()
    validation.core(bad, 3)
    with pytest.raises(ValueError, match=r"Batch 3 of `data`"):
        validation.flush()


def test_labels_that_are_no_class_are_found_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, walked on a CPU."""
    validation = LateValidation(nm.Categorical)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("meta"))
    outputs = [Outputs(torch.zeros(2, 3), torch.tensor([0, label]), None, i) for i, label in enumerate((1, 3, 2))]
    generator = torch.Generator()
    list(cotangents(outputs[0], nm.Empirical(), generator, validation))
    list(cotangents(outputs[1], nm.Empirical(), generator, validation))
    with pytest.raises(ValueError, match=r"Batch 1 of `data`: `labels` must be between 0 and 2"):
        list(cotangents(outputs[2], nm.Empirical(), generator, validation))


def test_devices_without_float64_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("mps"))
    for run in (nm.fisher_diagonal, nm.fisher_trace, nm.fisher_operator):
        with pytest.raises(
            ValueError, match=r"`model` must be on a device with float64, got one on mps\. Move it with"
        ):
            run(model, [torch.zeros(4, 3)])
