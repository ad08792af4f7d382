"""The first commands of docs/grpo.md: the reward rises as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve

PAGE = Path(__file__).parents[2] / "docs" / "grpo.md"


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_model_learns_the_format_that_is_rewarded(tmp_path: Path) -> None:
    block = re.search(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    script, *commands = re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]
    name, _, text = script.partition("\n")
    (tmp_path / name.removeprefix("cat > ")).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-e", "-c", "".join(commands)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        check=True,
    )
    steps = step_curve(read_events(RunPaths(tmp_path / "brackets").events))
    rewards = [step["objective"]["reward"] for step in steps.values()]
    assert len(rewards) == 40 and rewards[0] < 0.3 and mean(rewards[-5:]) > 0.9, rewards
