"""What stands around the code agrees with it: workflows, citation, badges, templates."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import neuromanifold as nm

yaml = pytest.importorskip("yaml")  # comes with transformers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs() -> dict[str, dict]:
    return {name: job for path in WORKFLOWS for name, job in yaml.safe_load(path.read_text())["jobs"].items()}


def test_workflows_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    assert {"make test", "make docs", "make release-check"} <= set(commands)
    assert all(command.split() == ["make", command.split()[1]] for command in commands)
    assert {command.split()[1] for command in commands} <= targets


def test_tests_run_on_every_python_that_is_promised() -> None:
    assert jobs()["test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_workflows_pin_actions_and_have_a_time_limit() -> None:
    for job in jobs().values():
        assert job["timeout-minutes"] <= 60
        assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in job["steps"] if "uses" in step)


def test_hooks_call_what_there_is() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"ruff-format", "ruff", "mypy"}
    scripts = [word for hook in hooks for word in hook["entry"].split() if word.endswith(".py")]
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == nm.__version__
    assert citation["license"] == PROJECT["license"]
    readme = (ROOT / "README.md").read_text()
    for word in (citation["references"][0]["title"], "2505.13614"):
        assert word in readme
        assert word in str(citation)


def test_badges_are_true() -> None:
    badges = re.findall(r"!\[([^\]]*)\]\(https://img\.shields\.io/badge/([^)]*)\)", (ROOT / "README.md").read_text())
    said = {label: text.replace("%20", " ").rsplit("-", 1)[0] for label, text in badges}
    assert said == {
        "version": f"version-{nm.__version__}",
        "Python": f"Python-{PYTHONS[0]}–{PYTHONS[-1]}",
        "PyTorch": "PyTorch-"
        + next(need for need in PROJECT["dependencies"] if "torch" in need).replace("torch>=", "≥"),
        "licence": f"licence-{PROJECT['license']}",
    }


@pytest.mark.skipif(
    shutil.which("check-jsonschema") is None, reason="make release-check installs it, and runs the same"
)
def test_schemas() -> None:
    for schema, files in (("github-workflows", WORKFLOWS), ("citation-file-format", [ROOT / "CITATION.cff"])):
        subprocess.run(["check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files], check=True)
