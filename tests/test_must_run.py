"""In CI a marked test that skips is a failure: tests/conftest.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.{mark}
def test_it():
    pytest.skip("no such thing here")
"""


@pytest.mark.parametrize(
    ("mark", "must_run", "passes"),
    [
        ("slow", True, False),
        ("cluster", True, False),
        ("slurm", True, False),
        ("slurm", False, True),
        ("gpu", True, True),
        ("usefixtures()", True, True),
        ("xfail", True, True),
    ],
)
def test_a_skip_of_a_marked_test(mark: str, must_run: bool, passes: bool, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_skipping.py").write_text(TESTS.format(mark=mark))
    environment = {k: v for k, v in os.environ.items() if k != "TRAINCTL_TESTS_MUST_RUN"}
    if must_run:
        environment["TRAINCTL_TESTS_MUST_RUN"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == (0 if passes else 1), done.stdout
    assert "no such thing here" in done.stdout or passes
