"""The tree is what its page says, and stages call only stages before them: in imports and at run time."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import neuromanifold as nm

ROOT = Path(__file__).parent.parent
PACKAGE = Path(nm.__file__).parent
PAGE = (ROOT / "docs" / "contribute" / "architecture.md").read_text()
STAGES = (
    "core",
    "reference",
    "kernels",
    "estimators",
    "problem",
    "persample",
    "results",
    "run",
    "operators",
    "bounds",
    "diagnostics",
    "hf",
    "uses",
    "report",
    "experiments",
    "cli",
)


def sources() -> dict[str, ast.Module]:
    """The modules of the package, parsed, by path."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def folders(package: Path) -> set[str]:
    """The folders directly in a package."""
    return {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}


# The tree.


def test_every_folder_is_a_stage_and_every_stage_a_folder() -> None:
    assert folders(PACKAGE) == set(STAGES)


def test_a_folder_that_is_no_stage_would_be_seen(tmp_path: Path) -> None:
    for name in (*STAGES, "__pycache__", "utilities"):
        (tmp_path / name).mkdir()
    assert folders(tmp_path) - set(STAGES) == {"utilities"}


def test_the_page_lists_the_stages_in_their_order() -> None:
    tree = PAGE.split("```text\n")[1].split("```")[0]
    assert tuple(re.findall(r"^(\w+)/ ", tree, re.MULTILINE)) == STAGES


def missing_paths(page: str) -> set[str]:
    """Files and folders in code spans and code blocks of a page that are neither in the package nor in the root."""
    code = re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL)
    paths = {path for span in code for path in re.findall(r"(?<![\w./~-])\w[\w.-]*/[\w./*-]*", span)}
    assert paths
    return {path for path in paths if not any(list(base.glob(path.rstrip("/"))) for base in (PACKAGE, ROOT))}


@pytest.mark.parametrize("page", ["docs/contribute/architecture.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_names_exists(page: str) -> None:
    assert not missing_paths((ROOT / page).read_text())


def test_a_path_that_is_gone_would_be_seen() -> None:
    page = "See `core/sums.py`, `core/gone.py`, `tests/zscores.py`, `persample/rules/`.\n```text\npullback/  rules\n```"
    assert missing_paths(page) == {"core/gone.py", "pullback/"}


def test_folders_and_files_stay_small() -> None:
    counts = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert not {str(folder): count for folder, count in counts.items() if count > 14}
    assert not {str(path) for path in PACKAGE.rglob("*.py") if path.read_text().count("\n") > 400}


# Names and docstrings.


def defined_twice(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Top-level classes (a leading underscore does not count) and public functions that two modules define."""
    places = defaultdict(list)
    for path, module in modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return {name: found for name, found in places.items() if len(set(found)) > 1}


def test_no_name_is_defined_twice() -> None:
    assert not defined_twice(sources())


def test_a_name_that_is_defined_twice_would_be_seen() -> None:
    modules = {"a.py": "class Plan: ...\ndef _helper(): ...", "b.py": "class _Plan: ...\ndef _helper(): ..."}
    assert defined_twice({path: ast.parse(text) for path, text in modules.items()}) == {"Plan": ["a.py", "b.py"]}


def test_docstrings_say_something() -> None:
    """Of four words or fewer there are at most 20: equations such as "tr M, [...].  O(C)."."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    short = [
        f"{path}: {text}"
        for path, module in sources().items()
        for node in ast.walk(module)
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and len(text.split()) <= 4
    ]
    assert len(short) <= 20, "\n".join(short)


# Imports.


def imported_stages(source: str) -> set[str]:
    """The stages that a module imports from, wherever in the file the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that the order of the stages can be read off"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "neuromanifold" and len(part) > 1 and part[1] in STAGES}


def forward_imports(stage: str, source: str) -> set[str]:
    return {other for other in imported_stages(source) if STAGES.index(other) > STAGES.index(stage)}


def test_stages_import_only_backwards() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in PACKAGE.glob("*/**/*.py")
        for other in forward_imports(path.relative_to(PACKAGE).parts[0], path.read_text())
    }
    assert not wrong


def test_a_forward_import_would_be_seen() -> None:
    assert forward_imports("core", "from neuromanifold.report.page import page") == {"report"}
    assert forward_imports("core", "def f():\n    from neuromanifold import cli") == {"cli"}
    assert forward_imports("report", "import neuromanifold.core.spectrum") == set()


def test_nothing_heavy_is_imported_with_the_package() -> None:
    heavy = "{'matplotlib', 'typer', 'rich', 'transformers', 'datasets', 'peft', 'PIL', 'jinja2'}"
    code = "import sys, torch; before = set(sys.modules); import neuromanifold; "
    code += f"print({heavy} & set(sys.modules) - before)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


# Calls.


def traced(call: Callable[[], object]) -> Counter[tuple[str, str]]:
    """How often which file calls which during a call, those of torch in between (a hook, a backward) left out."""
    prefix, found = f"{PACKAGE}/", Counter[tuple[str, str]]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(prefix):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(prefix):
            caller = caller.f_back
        if caller is not None:
            files = (one.f_code.co_filename.removeprefix(prefix) for one in (caller, frame))
            found[next(files), next(files)] += 1

    call()  # once before: what is imported or compiled on first use is not part of it
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def stage_calls(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Which stage calls which other one during a call."""
    pairs = {(caller.split("/")[0], callee.split("/")[0]) for caller, callee in traced(call)}
    return {(caller, callee) for caller, callee in pairs if caller != callee}


def both_ways(calls: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Pairs of stages that call each other."""
    calls = set(calls)
    return {(a, b) for a, b in calls if a < b and (b, a) in calls}


def network(batches: int = 2) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    return model, [torch.randn(8, 1, 8, 8) for _ in range(batches)]


def diagonal() -> object:
    return nm.fisher_diagonal(*network())


def bounds() -> object:
    return nm.fisher_bounds(*network())


def product(times: int = 1) -> object:
    model, data = network()
    operator = nm.fisher_operator(model, data)
    return [operator @ torch.ones(operator.shape[0]) for _ in range(times)]


@pytest.mark.parametrize(
    ("call", "expected"),
    [(diagonal, ("run", "persample")), (bounds, ("bounds", "persample")), (product, ("operators", "problem"))],
)
def test_no_two_stages_call_each_other(call: Callable[[], object], expected: tuple[str, str]) -> None:
    calls = stage_calls(call)
    assert expected in calls
    assert not both_ways(calls)


def test_a_diagonal_goes_through_the_files_that_the_page_names() -> None:
    """All but those of results, frozen values that are made without a call of theirs, and of CUDA graphs."""
    walk = PAGE.split("## One call of `fisher_diagonal`")[1].split("\n## ")[0]
    named = {path for path in re.findall(r"`(\w[\w/]*\.py)`", walk) if not path.startswith("results/")}
    assert len(named) >= 15
    assert named - {"run/graphs.py"} <= {path for pair in traced(diagonal) for path in pair}


def test_calls_enter_as_much_as_the_page_says() -> None:
    """The files that a call enters, and its calls of our own functions; to a tenth."""
    ten, four = (traced(lambda batches=batches: nm.fisher_diagonal(*network(batches))) for batches in (10, 4))
    whole, twice, once = traced(diagonal), traced(lambda: product(2)), traced(product)
    calls = [whole.total(), (ten.total() - four.total()) / 6, once.total(), twice.total() - once.total()]
    rows = re.findall(r"\| *(\d*) *\| ([\d,]+) \|$", PAGE.split("## How much a call enters")[1].split("\n## ")[0], re.M)
    assert [int(said.replace(",", "")) for _, said in rows] == pytest.approx(calls, rel=0.1)
    files = [len({path for pair in one for path in pair}) for one in (whole, once)]
    assert [int(said) for said, _ in rows if said] == pytest.approx(files, rel=0.1)


def test_a_call_in_both_directions_would_be_seen() -> None:
    assert both_ways([("run", "persample"), ("persample", "run"), ("run", "core")]) == {("persample", "run")}
