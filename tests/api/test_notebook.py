"""The example notebook: it runs as it stands, and is committed without outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from small_recipe import write_small_tiny

import trainctl

(FILE,) = (Path(__file__).parents[2] / "docs" / "examples").glob("*.ipynb")


def read() -> Any:
    return nbformat.read(FILE, as_version=4)  # type: ignore[no-untyped-call]


def test_it_has_no_outputs() -> None:
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recipe `tiny` that takes seconds."""
    write_small_tiny(tmp_path)
    root = str(Path(trainctl.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ["PYTHONPATH"]]))
    book = read()
    client = NotebookClient(book, timeout=900, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    streams = [output for output in outputs if output.output_type == "stream"]
    (printed,) = (each.text for each in streams if each.name == "stdout")  # the last cell's alone
    assert printed.startswith("def ")
    assert all("UserWarning" in each.text for each in streams if each.name == "stderr")
    shown = [output.data.get("text/html", "") for output in outputs if "data" in output]
    assert all(shown), "everything has a picture or a table"
    assert "<svg" in next(text for text in shown if "60 of 60" in text), "the curve of the run"
    assert "<iframe srcdoc=" in shown[-1]
