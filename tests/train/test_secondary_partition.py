"""ZeRO++ hpZ: the copy of the parameters within a node is always the one that was updated last."""

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.schema import DataType
from trainctl.runs.layout import RunPaths

STEPS, HALF = 4, 2
WORLD_SIZE = 4  # two nodes of two


def plan(partition):
    config = tiny_config(steps=STEPS, sequence_length=32)
    config.precision.compute = DataType.fp32
    config.zero_stage.stage = 3
    config.zero_stage.hpz_partition_size = partition
    config.optimizer.lr = 1e-3
    return tiny_plan(config, WORLD_SIZE)


@pytest.mark.slow
def test_the_curve_matches_one_partition(tmp_path):
    """Late weights would make the first forward pass read uninitialised memory."""
    plain, node, parts = (RunPaths(tmp_path / name) for name in ("plain", "node", "parts"))
    hpz = plan(2)
    train_cases(WORLD_SIZE, [Case(plan(1), plain), Case(hpz, node)])
    for step, (loss, norm) in curve(plain).items():
        assert curve(node)[step] == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-5))
    train_cases(WORLD_SIZE, [Case(with_stop(hpz, HALF), parts), Case(hpz, parts, attempt=2)])
    assert curve(parts) == curve(node)
