"""Pages that are written by a script are up to date, and hand-written tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from trainctl.errors import ExitCode

ROOT = Path(__file__).parents[1]


def test_the_reference_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "scripts" / "generate_reference.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}
