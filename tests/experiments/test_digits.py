"""The demo's network: trained well enough, repeatable, and without side effects."""

import sys

import pytest
import torch

from neuromanifold.experiments import one_thread
from neuromanifold.experiments.digits import TRAINING, digits_network, load_digits, train_digits


def test_the_digits_are_what_the_docstring_says() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert labels.unique().tolist() == list(range(10))


def test_training_succeeds_in_a_few_epochs_and_hands_over_training_data() -> None:
    trained = train_digits(samples=150, epochs=5)
    assert trained.test_accuracy > 0.9
    assert trained.training_accuracy > 0.9
    assert trained.parameters == sum(p.numel() for p in trained.model.parameters()) < 10_000
    assert [len(labels) for _, labels in trained.batches] == [64, 64, 22]
    assert all(images.shape[1:] == (1, 8, 8) for images, _ in trained.batches)
    assert all(parameter.grad is None for parameter in trained.model.parameters())


def test_a_seed_gives_one_network_and_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    a, b, c = (train_digits(samples=64, seed=seed, epochs=1) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in a.model.state_dict().items():
        assert torch.equal(value, b.model.state_dict()[name])
        assert not torch.equal(value, c.model.state_dict()[name])
    assert torch.equal(a.batches[0][0], b.batches[0][0])
    assert not torch.equal(a.batches[0][0], c.batches[0][0])


def test_without_epochs_the_network_is_as_initialised() -> None:
    untrained = train_digits(samples=1, seed=4, epochs=0)
    for name, value in digits_network(seed=4).state_dict().items():
        assert torch.equal(value, untrained.model.state_dict()[name])
    assert untrained.test_accuracy < 0.5


@pytest.mark.parametrize("samples", [0, TRAINING + 1])
def test_impossible_numbers_of_samples_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        train_digits(samples=samples)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'neuromanifold\[demo\]'"):
        load_digits()


def test_the_number_of_threads_is_put_back_after_an_error() -> None:
    before = torch.get_num_threads()
    inside = []

    @one_thread()
    def fail() -> None:
        inside.append(torch.get_num_threads())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [1]
    assert torch.get_num_threads() == before
