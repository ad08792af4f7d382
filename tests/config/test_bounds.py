"""Files that unfold without bounds, and values of a billion: refused in time, by processor time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trainctl.cli.main import run as command

TEN = ",".join(["x"] * 10)
START = "defaults: [tiny, _self_]\n"


def aliases(form: str) -> str:
    """Nine levels, each ten times the one before."""
    lines = [f"a0: &a0 {form.format(TEN)}"]
    lines += [f"a{n}: &a{n} {form.format(','.join([f'*a{n - 1}'] * 10))}" for n in range(1, 9)]
    return "\n".join(lines) + "\n"


HOSTILE = {
    "aliases": aliases("[{}]"),
    "merges": "a0: &a0 {x: 1}\n" + aliases("{{<<: [{}]}}").split("\n", 1)[1],
    "circle": "model: &a {b: *a}\n",
    "nested": f"model: {'[' * 50_000}{']' * 50_000}\n",
    "nested blocks": f"model:\n {'- ' * 50_000}1\n",
    "keys": "".join(f"key{n}: {n}\n" for n in range(9_000)),
    "pipe": "",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_recipe_without_bounds_is_refused_at_once(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipes" / "own.yaml"
    file.parent.mkdir()
    if name == "pipe":
        os.mkfifo(file)
    else:
        file.write_text(START + HOSTILE[name])
    before = time.process_time()
    assert command(["validate", "recipe=own", "--config-dir", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert time.process_time() - before < 2.0
    assert len(said) < 2000 and "own" in said


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("7b-zero3", ["training.global_batch_size=null", "training.micro_batch_size=1000000000"]),
        ("tiny", ["training.global_batch_size=null", "training.micro_batch_size=720720000000"]),
        ("tiny", ["training.gradient_accumulation_steps=1000000000000"]),
        ("tiny", ["training.global_batch_size=1000000000000", "hardware.nodes=1000000000"]),
    ],
)
def test_a_billion_is_refused_within_two_seconds(recipe: str, overrides: list[str]) -> None:
    before = time.process_time()
    assert command(["launch", "--dry-run", f"recipe={recipe}", *overrides]) in (2, 3)
    assert time.process_time() - before < 2.0
