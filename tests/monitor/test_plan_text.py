"""Plan and budget of a launch fit a screen."""

from __future__ import annotations

import pytest
from whole_recipes import WHOLE

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.monitor.plan_text import brief_lines, plan_lines
from trainctl.tuning.assess import assess

SCREEN, COLUMNS = 24, 80
AROUND = 4
"""Lines of a launch besides: the hint to --verbose, the run directory, its start, the live line."""


@pytest.mark.parametrize("recipe", WHOLE)
def test_a_launch_begins_on_one_screen(recipe: str) -> None:
    config = compose([f"recipe={recipe}"]).config
    assessment = assess(config, resolve_hardware(config.hardware))
    assert assessment.plan is not None and assessment.budget is not None
    lines = [*plan_lines(assessment.plan, brief=True), *brief_lines(assessment.budget.to_json())]
    assert len(lines) + AROUND <= SCREEN
    assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    assert ("; bubble " in lines[3]) == (assessment.plan.mesh.pipeline > 1)
    whole = plan_lines(assessment.plan)
    assert "  derived" in whole and "  derived" not in lines
