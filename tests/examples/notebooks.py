"""Run a notebook without Jupyter, and fill in its outputs: `python -m tests.examples.notebooks examples/*.ipynb`."""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path

Output = dict[str, object]


def shown(value: object) -> Output:
    """What a notebook shows for the last expression of a cell: a figure as PNG, HTML if the object has it, its repr."""
    data: dict[str, str] = {"text/plain": repr(value)}
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png", dpi=70, metadata={"Software": None})
        data = {"text/plain": "<Figure>", "image/png": base64.b64encode(file.getvalue()).decode()}
    elif hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_()
    return {"output_type": "display_data", "metadata": {}, "data": data}


def outputs(notebook: dict) -> list[list[Output]]:
    """The outputs of all code cells, run one after the other in one namespace."""
    values: dict[str, object] = {"__name__": "__main__"}
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        printed, cell_outputs = io.StringIO(), list[Output]()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "cell", "exec"), values)
            value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), values)
        if printed.getvalue():
            cell_outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
        if value is not None:
            cell_outputs.append(shown(value))
        found.append(cell_outputs)
    return found


def main(paths: list[str]) -> None:
    """Run notebooks and write their outputs into them."""
    for path in map(Path, paths):
        notebook = json.loads(path.read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, found) in enumerate(zip(cells, outputs(notebook), strict=True)):
            cell["outputs"], cell["execution_count"] = found, number + 1
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
