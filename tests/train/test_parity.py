"""The same seed gives the same curve at every ZeRO stage, on one process and on two."""

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import CheckpointingMode, DataType, ModelFamily
from trainctl.runs.layout import RunPaths

STEPS = 30
CLIPPING = 0.5


def config(stage, **changes):
    built = tiny_config(steps=STEPS)
    built.zero_stage.stage = stage
    built.precision.compute = DataType.fp32
    built.optimizer.gradient_clipping = CLIPPING
    built.optimizer.lr = 1e-3
    built.schedule.warmup_steps = 3
    built.checkpoint.at_end = False
    for key, value in changes.items():
        section, _, name = key.partition("__")
        setattr(getattr(built, section), name, value)
    return built


def train(tmp_path, world_size, configs):
    """Curves of the configs, trained in one process start."""
    cases = [
        Case(tiny_plan(item, world_size), RunPaths(tmp_path / f"{world_size}-{index}"))
        for index, item in enumerate(configs)
    ]
    train_cases(world_size, cases)
    return [curve(case.run) for case in cases]


def assert_equal(reference, other, tolerance):
    assert list(reference) == list(other) == list(range(1, STEPS + 1))
    for step, (loss, norm) in reference.items():
        assert other[step][0] == pytest.approx(loss, abs=tolerance), step
        assert other[step][1] == pytest.approx(norm, rel=tolerance), step


def test_fp32_curves_agree_over_stages_and_processes(tmp_path):
    one = train(tmp_path, 1, [config(stage) for stage in range(4)])
    two = train(tmp_path, 2, [config(stage) for stage in range(4)])
    reference = one[0]
    assert sum(norm > CLIPPING for _, norm in reference.values()) >= 20
    assert reference[STEPS][0] < reference[1][0] - 0.8
    for other in (*one[1:], *two):
        assert_equal(reference, other, 1e-5)


def test_bf16_curves_agree_and_the_first_step_is_the_same(tmp_path):
    """At stage 0 DeepSpeed makes a hidden first step, which would shift Adam's bias correction."""
    curves = train(
        tmp_path, 2, [config(stage, precision__compute=DataType.bf16) for stage in range(4)]
    )
    for other in curves[1:]:
        assert other[1] == pytest.approx(curves[0][1], rel=1e-3)
        for step, (loss, _) in curves[0].items():
            assert other[step][0] == pytest.approx(loss, abs=2e-3), step


@pytest.mark.slow
@pytest.mark.parametrize("family", [ModelFamily.gpt2, ModelFamily.mistral, ModelFamily.qwen3])
def test_every_family_agrees_between_stage_0_and_3(tmp_path, family):
    changes = {"model__family": family}
    if family is ModelFamily.gpt2:
        changes["model__num_key_value_heads"] = None
    stages = [config(stage, **changes) for stage in (0, 3)]
    (plain,) = train(tmp_path, 1, stages[:1])
    for other in train(tmp_path, 2, stages):
        assert_equal(plain, other, 1e-5)


def test_recomputing_activations_and_masking_documents_change_what_they_should(tmp_path):
    plain, masked, full = train(
        tmp_path,
        2,
        [
            config(2),
            config(2, data__mask_documents=True),
            config(3, activation_checkpointing__mode=CheckpointingMode.full),
        ],
    )
    assert_equal(plain, full, 1e-5)
    assert masked != plain
