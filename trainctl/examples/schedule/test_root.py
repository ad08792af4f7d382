"""Test of the schedule: its curve at some steps."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trainctl.config.registry import load_spec, new_section, trust_folder
from trainctl.options.schedule import Course

trust_folder(Path(__file__).parents[1] / "options")
BATCHES = SimpleNamespace(tokens_before=lambda step: step, steps_for=lambda tokens: tokens)


def test_the_curve() -> None:
    section = new_section("schedule", "root")
    course = Course(config=section, batches=BATCHES, total_steps=101, warmup_steps=0)
    shape = load_spec("schedule", "root").shape
    curve = [shape(course, step) for step in range(101)]
    assert (curve[0], curve[100]) == (1.0, 0.0)
    assert curve == sorted(curve, reverse=True)
    assert curve[75] == pytest.approx(0.5)  # the square root of a quarter
