"""Try an installed wheel where nothing else is installed: `make release-check` runs this outside of the clone."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import neuromanifold as nm


def run(*arguments: str) -> str:
    """What the command of this environment prints."""
    command = [str(Path(sys.executable).parent / "neuromanifold"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(root: Path) -> None:
    """Check version and files, run the README's first lines, and a result's way through the command line."""
    package = Path(nm.__file__).parent
    assert root not in package.parents, f"{package} is the clone, not what was installed"
    assert nm.__version__ in (root / "CHANGELOG.md").read_text().split("\n## ")[1]
    for name in ("py.typed", "kernels/c/*.c", "report/templates"):
        assert list(package.glob(name)), f"the wheel has no {name}"
    values: dict[str, object] = {}
    code = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    exec(code, values)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "fisher.safetensors")
        values["fim"].save(file)  # type: ignore[attr-defined]
        assert "2.bias" in run("inspect", file)
        run("report", file, "-o", str(Path(folder) / "page.html"))
        assert (Path(folder) / "page.html").stat().st_size > 10_000
    assert nm.__version__ in run("env")
    print(f"neuromanifold {nm.__version__} works from {package} on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
