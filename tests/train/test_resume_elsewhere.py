"""A run goes on with the same curve and the same samples on another layout.

Every pair of stages with two pairs of process counts, once by way of offload and once without; the
full product is `scripts/resume_matrix.py`.
"""

import pytest
from elsewhere import (
    OVERSHOOT,
    PROCESSES,
    REFERENCE,
    STAGES,
    Leg,
    largest_difference,
    offloaded,
    plain,
    replayed_steps,
    sees_every_sample_once,
    travel,
)


def assert_same_run(runs, journey):
    run = runs[journey]
    assert largest_difference(run, runs[REFERENCE]) < 1e-5, journey
    assert sees_every_sample_once(run, journey[-1].plan()), journey
    assert replayed_steps(run) == OVERSHOOT * (len(journey) - 1), journey


def test_fewer_processes_and_another_stage(tmp_path):
    journey = (Leg(2, 1), Leg(1, 3))
    assert_same_run(travel(tmp_path, [journey]), journey)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_pair_of_changes(tmp_path):
    journeys = [
        (offloaded if (row // 2 + column // 2) % 2 else plain)(processes, stages)
        for row, processes in enumerate(PROCESSES)
        for column, stages in enumerate(STAGES)
        if (row + column) % 2 == 0
    ]
    runs = travel(tmp_path, journeys)
    for journey in journeys:
        assert_same_run(runs, journey)
