"""`show`, `compare`, `combine` and `env`: what is done with files."""

from pathlib import Path

import pytest
import torch

import neuromanifold as nm
from neuromanifold.results import Provenance
from tests.cli.commands import bad, good


def result(seed: int = 0, names: tuple[str, ...] = ("body.weight", "head.weight"), count: int = 5) -> nm.DiagonalFisher:
    generator = torch.Generator().manual_seed(seed)
    sums = {name: torch.rand(3, 4, generator=generator) for name in names}
    provenance = Provenance(
        "Hutchinson(deflate=0)", "unbiased", seeds=[seed], batches=2, passes=2, model="a model", data="data"
    )
    return nm.DiagonalFisher(sums, {name: 0.1 * value for name, value in sums.items()}, count, count, provenance)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, path in enumerate(paths):
        result(seed).save(path)
    return paths


def test_show_is_a_table_with_provenance(files: list[Path]) -> None:
    said = good("show", files[0])
    assert "per sample" in said
    for word in (
        "body",
        "head",
        "all",
        "24",
        "10 %",
        "Hutchinson(deflate=0)",
        "unbiased",
        "a model",
        "2, 2 backward passes",
    ):
        assert word in said, word
    mean = float(result()["head.weight"].mean())
    assert f"{mean:.3g}" in said
    assert f"{5 * mean:.3g}" in good("show", files[0], "--sum")


def test_show_some_parameters_and_each(files: list[Path]) -> None:
    said = good("show", files[0], "-p", "head.*", "--each")
    assert "head.weight" in said
    assert "body" not in said
    assert "matches" in bad("show", files[0], "-p", "tail.*")


def test_show_a_trace(tmp_path: Path) -> None:
    result().trace.save(tmp_path / "trace.json")
    assert "tr F =" in good("show", tmp_path / "trace.json")
    assert "a diagonal" in bad("compare", tmp_path / "trace.json", tmp_path / "trace.json")


def test_show_a_kronecker_factored_result(tmp_path: Path) -> None:
    nm.fisher_kronecker(torch.nn.Linear(4, 3), [torch.ones(5, 4)]).save(tmp_path / "k.safetensors")
    said = good("show", tmp_path / "k.safetensors")
    assert "eigenvalues corrected, 5 samples" in said
    assert "Kronecker 3 x 5" in said
    assert "show" in bad("report", tmp_path / "k.safetensors", "-o", tmp_path / "page.html")


def test_compare_says_how_far_for_each_component(files: list[Path]) -> None:
    said = good("compare", *files)
    found = result(0).compare(result(1))
    for number in (f"{found.relmae_positive:.3g}", f"{found.mean_ratio:.4g}", f"{found.cosine:.4f}"):
        assert number in said
    itself = good("compare", files[0], files[0])
    assert "100.0 %" in itself
    assert "1.0000" in itself


def test_compare_refuses_other_parameters(files: list[Path], tmp_path: Path) -> None:
    result(0, ("body.weight", "tail.weight")).save(tmp_path / "c.safetensors")
    said = bad("compare", files[0], tmp_path / "c.safetensors")
    assert "head.weight, tail.weight" in said
    assert "body" in good("compare", files[0], tmp_path / "c.safetensors", "-p", "body.*")


def test_combine_adds(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "both.safetensors"
    assert "4, 4 backward passes" in good("combine", *files, "-o", out)
    both = nm.load(out)
    assert isinstance(both, nm.DiagonalFisher)
    torch.testing.assert_close(both.sums["head.weight"], (result(0) + result(1)).sums["head.weight"])
    assert "two or more" in bad("combine", files[0], "-o", out)
    other = tmp_path / "other.safetensors"
    result(2, ("body.weight",)).save(other)
    assert "a result for the same parameters" in bad("combine", files[0], other, "-o", out)


def test_combine_says_when_noise_is_shared(tmp_path: Path) -> None:
    for name in "ab":
        result(0).save(tmp_path / f"{name}.safetensors")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = good("combine", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "-o", tmp_path / "c.safetensors")
    assert "Note: Both results were made with the same seed" in said


@pytest.mark.parametrize("command", ["show", "compare"])
def test_files_that_are_no_results(files: list[Path], tmp_path: Path, command: str) -> None:
    second = [files[0]] if command == "compare" else []
    whole, broken = files[0].read_bytes(), tmp_path / "broken.safetensors"
    broken.write_bytes(whole[: len(whole) // 2])
    assert "truncated or damaged" in bad(command, broken, *second)
    assert "No file" in bad(command, tmp_path / "none.safetensors", *second)
    torch.save({"a": 1}, tmp_path / "pickle.pt")
    assert "is a pickle" in bad(command, tmp_path / "pickle.pt", *second)
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "is a pickle" in bad(command, tmp_path / "old.pt", *second)


def test_env_lists_versions_and_devices() -> None:
    said = good("env")
    assert nm.__version__ in said
    assert torch.__version__ in said
    assert "cpu" in said


@pytest.mark.slow  # it writes 800 MB
def test_show_of_a_hundred_million_parameters(tmp_path: Path) -> None:
    sums = {f"layer.{i}.weight": torch.full((2500, 4000), 1.0 + i) for i in range(10)}
    provenance = Provenance("Hutchinson(deflate=0)", "unbiased")
    large = nm.DiagonalFisher(sums, {name: 0.1 * v for name, v in sums.items()}, 1, 1, provenance)
    large.save(tmp_path / "large.safetensors")
    total = next(line for line in good("show", tmp_path / "large.safetensors").splitlines() if line.startswith("all "))
    assert total.split() == ["all", "100,000,000", "0.0", "%", "5.5", "5.5", "10", "10", "%"]
