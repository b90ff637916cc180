"""The stages stand in an order, and import only backwards."""

import ast
from pathlib import Path

import neuromanifold

PACKAGE = Path(neuromanifold.__file__).parent
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


def violations(stage: str, source: str) -> set[str]:
    return {other for other in imported_stages(source) if STAGES.index(other) > STAGES.index(stage)}


def test_every_folder_is_a_stage() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(STAGES)


def test_stages_import_only_backwards() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in PACKAGE.glob("*/**/*.py")
        for other in violations(path.relative_to(PACKAGE).parts[0], path.read_text())
    }
    assert not wrong


def test_a_forward_import_would_be_seen() -> None:
    assert violations("core", "from neuromanifold.report.page import page") == {"report"}
    assert violations("core", "def f():\n    from neuromanifold import cli") == {"cli"}
    assert violations("report", "import neuromanifold.core.spectrum") == set()


def test_files_stay_short() -> None:
    long = {str(path): lines for path in PACKAGE.rglob("*.py") if (lines := path.read_text().count("\n")) > 400}
    assert not long


def test_nothing_heavy_is_imported_with_the_package() -> None:
    import subprocess
    import sys

    heavy = "{'matplotlib', 'typer', 'rich', 'transformers', 'datasets', 'peft', 'PIL', 'plotly'}"
    code = f"import sys, neuromanifold; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
