"""Pages that are written by a script are up to date, and hand-written tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.errors import ExitCode

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "script", ["generate_reference.py", "generate_rules.py", "generate_optimizers.py"]
)
def test_a_written_page_is_up_to_date(script: str) -> None:
    command = [sys.executable, ROOT / "scripts" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def test_every_identifier_of_a_finding_is_documented() -> None:
    page = (ROOT / "docs" / "rules.md").read_text()
    sources = [path.read_text() for path in (ROOT / "trainctl").rglob("*.py")]
    used = {name for source in sources for name in re.findall(r'"(TC\d{3})"', source)}
    assert used == set(re.findall(r"^\| (TC\d{3}) \|", page, re.MULTILINE))
