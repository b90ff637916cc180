"""A problem iterates its batches, evaluates them, and selects the positions that count."""

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import neuromanifold as nm
from neuromanifold.problem.batches import Batch, cut, map_tensors, read_batch, tensors_in
from neuromanifold.problem.cotangents import cotangents
from neuromanifold.problem.model import plain_name, select_parameters
from neuromanifold.problem.problem import Problem

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, -100, 1, -100, 0])
MODEL = nn.Linear(4, 3)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    name: str


def nested(x: Tensor) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.SequenceClassifierOutput(logits=x)
    encoding = transformers.BatchEncoding({"ids": x})
    return {"a": (x, [x, "text"]), "b": Pair(x, 1), "c": Graph(x, "g"), "d": encoding, "e": output, "f": None}


def test_tensors_are_mapped_in_containers_of_every_kind() -> None:
    value = nested(X)
    doubled = map_tensors(lambda t: 2 * t, value)
    assert len(tensors_in(value)) == len(tensors_in(doubled)) == 6
    assert all(torch.equal(t, 2 * X) for t in tensors_in(doubled))
    assert [type(part) for part in doubled.values()] == [type(part) for part in value.values()]
    assert torch.equal(value["d"]["ids"], X)  # the original is left alone
    assert (doubled["c"].name, doubled["a"][1][1]) == ("g", "text")


def test_batches_are_moved_with_all_that_they_hold() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = Batch((nested(X), packed), {"x": X}, Y, 7).to(torch.device("cpu"))
    assert isinstance(batch.args[1], PackedSequence)
    assert batch.number == 7
    meta = Batch((nested(X),), {"x": X}, Y).to(torch.device("meta"))
    assert {t.device.type for t in tensors_in(tuple(meta))} == {"meta"}


def test_samples_are_cut_out_of_a_batch() -> None:
    batch = Batch((nested(X), torch.arange(5)), {"mask": X[:, 0]}, Y).cut(6, slice(1, 3))
    assert [t.shape[0] for t in tensors_in((batch.args[0], batch.kwargs, batch.labels))] == [2] * 8
    assert torch.equal(batch.args[1], torch.arange(5))  # no dimension of six
    time_first = Batch((torch.zeros(5, 6, 2),), {}, torch.zeros(5, 6)).cut(6, slice(1), batch_dim=1)
    assert (time_first.args[0].shape, time_first.labels.shape) == ((5, 1, 2), (5, 1))  # type: ignore[union-attr]
    square = Batch((torch.zeros(6, 6, 2),), {}, torch.zeros(6, 6)).cut(6, slice(1), batch_dim=1)
    assert (square.args[0].shape, square.labels.shape) == ((6, 1, 2), (6, 1))  # type: ignore[union-attr]
    assert cut((X, "text"), 6, slice(2))[0].shape == (2, 4)


@pytest.mark.parametrize("shape", [(6,), (3, 2)], ids=["samples", "tokens"])
def test_selected_rows_can_be_scattered_back(shape: tuple[int, ...]) -> None:
    problem = Problem.of(MODEL, [(X.view(*shape, 4), Y.view(shape))])
    with problem.session():
        outputs = problem.evaluate(next(problem.batches()))
    counts = Y != -100
    assert (int(outputs.positions), int(outputs.samples)) == (4, 4 if len(shape) == 1 else 3)
    compact = problem.distributions(outputs, compact=True)
    torch.testing.assert_close(compact.core.probs, MODEL(X).softmax(-1)[counts])  # type: ignore[attr-defined]
    assert torch.equal(compact.labels, Y[counts])
    padded = problem.distributions(outputs)
    assert len(padded.labels) == (6 if len(shape) == 1 else 4)  # samples stay, so that a GPU is not waited for
    for core, labels in (compact, padded):
        back = outputs.scatter(core.score(labels)).flatten(0, -2)
        assert torch.equal(back[~counts], torch.zeros(2, 3))
        assert torch.equal(back[counts], compact.core.score(compact.labels))


def test_cotangents_are_those_of_the_positions_that_count() -> None:
    problem = Problem.of(MODEL, [(X, Y)])
    with problem.session():
        outputs = problem.evaluate(next(problem.batches()))
        found = [c.values for c in cotangents(outputs, nm.Exact(), torch.Generator(), problem.validation())]
    total = sum(u[:, :, None] * u[:, None] for u in found)
    core = nm.Categorical(outputs.logits.detach())
    torch.testing.assert_close(total, core.fisher() * (Y != -100)[:, None, None])


def loader(shuffle: bool, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=shuffle, generator=generator)


def test_passes_over_the_same_data_are_alike() -> None:
    problem = Problem.of(MODEL, loader(shuffle=False))
    repeated = problem.repeated()
    next(iter(repeated))  # a pass that is not finished says nothing of the number of batches
    passes = [[batch.args[0] for batch in repeated] for _ in range(3)]
    assert all(torch.equal(torch.cat(one), X) for one in passes)
    assert [batch.number for batch in repeated.batches(description="again")] == [0, 1, 2]


class Changing:
    """Other batches in each pass."""

    def __init__(self, *passes: list[Tensor]) -> None:
        self.passes = iter(passes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(next(self.passes))

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (loader(shuffle=True), "another batch 0"),
        (Changing([X, X], [X, X + 1]), "another batch 1"),
        (Changing([X, X], [X]), "1 batches after 2"),
        (Changing([X], [X, X]), "more than 1 batches"),
    ],
    ids=["shuffled", "changed", "fewer", "more"],
)
def test_passes_over_other_data_are_refused(data: Any, text: str) -> None:
    repeated = Problem.of(MODEL, data).repeated()
    list(repeated)
    with pytest.raises(ValueError, match=rf"`data` must be the same batches in each pass, got {text}.*shuffle=False"):
        list(repeated)


def test_tensors_changed_in_place_between_passes_are_found() -> None:
    x = X.clone()
    repeated = Problem.of(MODEL, [x]).repeated()
    list(repeated)
    x += 1
    with pytest.raises(ValueError, match="another batch 0"):
        list(repeated)


def test_an_iterator_cannot_be_repeated() -> None:
    with pytest.raises(TypeError, match=r"an iterator.*list\(data\)"):
        Problem.of(MODEL, iter([X])).repeated()


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("0.weight", "0.weight"),
        ("_orig_mod.0.weight", "0.weight"),
        ("module._orig_mod.0.weight", "0.weight"),
        ("_orig_mod.module.module.0._orig_mod.weight", "0.weight"),
        ("layer.module.weight", "layer.module.weight"),
        ("module", "module"),
    ],
)
def test_plain_names(name: str, plain: str) -> None:
    assert plain_name(name) == plain


class Wrapper(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.module = nn.Linear(4, 3)
        self.weight = nn.Parameter(torch.ones(1)) if own else None


def test_parameters_have_their_plain_names_unless_two_would_be_the_same() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 3)), backend="eager")
    assert list(select_parameters(compiled, None)) == ["0.weight", "0.bias"]
    assert list(select_parameters(compiled, "_orig_mod.0.w*")) == ["0.weight"]
    assert list(select_parameters(Wrapper(own=False), None)) == ["weight", "bias"]
    assert list(select_parameters(Wrapper(own=True), None)) == ["weight", "module.weight", "bias"]


def test_a_function_has_the_fisher_information_of_the_module() -> None:
    parameters = {name: value.detach() for name, value in MODEL.named_parameters()}

    def function(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ parameters["weight"].T + parameters["bias"]

    problem, expected = Problem.of(function, [X], parameters=parameters), Problem.of(MODEL, [X])
    assert list(problem.parameters) == ["weight", "bias"]
    assert problem.parameters["weight"].data_ptr() == MODEL.weight.data_ptr()
    with problem.session():
        logits = [one.evaluate(next(one.batches())).logits for one in (problem, expected)]
    torch.testing.assert_close(*logits)


def test_a_session_is_eager_and_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9))
    problem = Problem.of(torch.compile(model, backend="eager"), [X])
    with torch.no_grad(), problem.session():
        outputs = problem.evaluate(next(problem.batches()))
        assert outputs.logits.requires_grad
        torch.testing.assert_close(outputs.logits, model[0](X))
    assert model.training


def test_inputs_of_a_real_decoder_come_from_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    labels = torch.tensor([[3, 4, 5], [6, 1, -100]])
    problem = Problem.of(model, [{"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": labels}])
    with problem.session():
        batch = next(problem.batches())
        outputs = problem.evaluate(batch)
    assert batch.kwargs["decoder_input_ids"].tolist() == [[0, 3, 4], [0, 6, 1]]
    assert (outputs.logits.shape, int(outputs.positions)) == ((2, 3, 11), 5)


def test_labels_under_a_key_of_their_own() -> None:
    batch = read_batch({"x": X, "target": Y}, 3, "target")
    assert (list(batch.kwargs), batch.labels is Y, batch.number) == (["x"], True, 3)
