"""Tests that CI fails on a skipped marked test (`tests/conftest.py`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MARKS = ("slow", "cluster", "slurm", "gpu", "usefixtures()", "xfail")
TEST = """
@pytest.mark.{mark}
def test_{name}():
    pytest.skip("no such thing here")
"""


@pytest.mark.parametrize(
    ("must_run", "failing"), [(True, {"slow", "cluster", "slurm"}), (False, set())]
)
def test_a_skip_of_a_marked_test(must_run: bool, failing: set[str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_skipping.py").write_text(
        "import pytest\n"
        + "".join(TEST.format(mark=mark, name=mark.rstrip("()")) for mark in MARKS)
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRAINCTL_TESTS_MUST_RUN"}
    if must_run:
        environment["TRAINCTL_TESTS_MUST_RUN"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == (1 if failing else 0), done.stdout
    found = set(re.findall(r"^FAILED test_skipping.py::test_(\w+)", done.stdout, re.MULTILINE))
    assert found == failing, done.stdout
    assert "no such thing here" in done.stdout


def test_a_mark_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    """CI would not find the test."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "marks.py").write_text("import pytest\n\nheavy = pytest.mark.slow\n")
    hidden = tmp_path / "test_hidden.py"
    hidden.write_text("from marks import heavy\n\n\n@heavy\ndef test_one():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert f"{hidden} has tests marked slow" in done.stderr
