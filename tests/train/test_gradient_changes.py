"""Tests of gradient options against a short single-process torch loop, at every ZeRO stage."""

import functools
import math
import tempfile
from pathlib import Path

import pytest
import torch
from plain_torch import plain_torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.schema import (
    AdaptiveClipping,
    GradientsConfig,
    GroupOverride,
    OffloadDevice,
    RunConfig,
)
from trainctl.engines.shards import ElementRange, Shard
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.gradients import (
    NormHistory,
    _on_one_device,
    elementwise_change,
    standard_normal,
)

STEPS = 4
CLIPPING = 20.0  # more than any norm here
SMALL_CLIPPING = 0.01  # less than any limit: if it had a part in an adaptive one, all would differ
OPTIONS = {
    "centralize": {"centralize": True},
    "clip_value": {"clip_value": 2e-3},
    "noise": {"noise": 1e-6, "noise_decay": 0.55},
    "group": {"group_clipping": 0.02},
    "percentile": {"adaptive_clipping": AdaptiveClipping.percentile, "adaptive_percentile": 25.0},
    "mean": {"adaptive_clipping": AdaptiveClipping.mean, "adaptive_factor": 0.5},
}
TOGETHER = {
    name: value
    for option in ("centralize", "clip_value", "noise", "group", "percentile")
    for name, value in OPTIONS[option].items()
}


def changing(stage, options):
    own = {f"gradients__{name}": value for name, value in options.items()}
    clipping = own.pop("gradients__group_clipping", None)
    if clipping is not None:
        group = GroupOverride(match="embed", gradient_clipping=clipping)
        own["optimizer__groups"] = [group]
    return tiny_config(
        steps=STEPS,
        evaluation_samples=0,
        sequence_length=32,
        precision__compute="fp32",
        zero_stage__stage=stage,
        optimizer__lr=1e-3,
        optimizer__gradient_clipping=(
            SMALL_CLIPPING if "adaptive_clipping" in options else CLIPPING
        ),
        schedule__kind="constant",
        schedule__warmup_steps=0,
        checkpoint__at_end=False,
        **own,
    )


def train(folder, stage, options, **layout):
    config = changing(stage, options)
    for key, value in layout.items():
        section = config.offload if key == "optimizer" else config.parallelism
        setattr(section, key, value)
    run = RunPaths(folder / "-".join(map(str, (stage, *options, *layout))))
    train_cases(2, [Case(tiny_plan(config, 2), run)])
    return run


@functools.cache
def reference(options):
    """Loss and gradient norm by step, and the limits of the norm, in plain torch."""
    with tempfile.TemporaryDirectory() as folder:
        made = plain_torch(changing(0, dict(options)), Path(folder), steps=STEPS)
    return made.curve, made.limits


def assert_as_reference(folder, stage, options, **layout):
    run = train(folder, stage, options, **layout)
    expected, limits = reference(tuple(options.items()))
    found = curve(run)
    for step, (loss, norm) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-5), step
        assert found[step][1] == pytest.approx(norm, rel=2e-5), step
    records = [event for event in read_events(run.events) if event["event"] == "step"]
    if "adaptive_clipping" in options:
        assert [event["clip_at"] for event in records] == pytest.approx(limits, rel=2e-5)
    if "group_clipping" in options:
        assert all(set(event["clipped_groups"]) == {"undecayed, clip 0.02"} for event in records)


@pytest.mark.parametrize("stage", range(4))
def test_all_gradient_changes_together(tmp_path, stage):
    assert_as_reference(tmp_path, stage, TOGETHER)


def test_each_changes_the_curve(tmp_path):
    """Each option changes the curve by more than the tolerance above, so a dead option would be
    seen.
    """
    plain, _ = reference(())
    for options in OPTIONS.values():
        found, _ = reference(tuple(options.items()))
        changed = max(
            abs(found[step][at] / value - 1)
            for step, pair in plain.items()
            for at, value in enumerate(pair)
        )
        assert changed > 2e-4, options


def test_the_tensors_of_an_entry_are_clipped_by_their_norm_together(tmp_path):
    limit = 0.01
    config = changing(1, {})
    config.optimizer.groups = [GroupOverride(match="layers", gradient_clipping=limit)]
    run = RunPaths(tmp_path)
    train_cases(2, [Case(tiny_plan(config, 2), run)])
    for event in (each for each in read_events(run.events) if each["event"] == "step"):
        names = [f"{kind}, clip {limit:g}" for kind in ("decayed", "undecayed")]
        norm = math.hypot(*(event["grad_norms"][name] for name in names))
        factors = [event["clipped_groups"][name] for name in names]
        assert factors == pytest.approx([limit / norm] * 2, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "option"),
    [
        (2, "clip_value"),
        (1, "noise"),
        (3, "mean"),  # which is not among those together
    ],
)
def test_each_gradient_change_alone(tmp_path, stage, option):
    assert_as_reference(tmp_path, stage, OPTIONS[option])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "axis"), [(1, "pipeline"), (3, "tensor"), (2, "sequence")])
def test_all_gradient_changes_on_other_layouts(tmp_path, stage, axis):
    assert_as_reference(tmp_path, stage, TOGETHER, **{axis: 2})


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles CPUAdam when it is first used
def test_all_gradient_changes_with_offload_to_host_memory(tmp_path):
    assert_as_reference(tmp_path, 3, TOGETHER, optimizer=OffloadDevice.cpu)


@pytest.mark.slow
def test_a_resumed_run_changes_them_as_the_whole_one(tmp_path):
    config = changing(2, TOGETHER)
    config.checkpoint.at_end = True
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    plan = tiny_plan(config, 2)
    train_cases(2, [Case(plan, whole), Case(with_stop(plan, 3), parts)])
    train_cases(2, [Case(plan, parts, attempt=2)])
    assert curve(parts) == curve(whole)
    limits = [
        [event["clip_at"] for event in read_events(run.events) if event["event"] == "step"]
        for run in (whole, parts)
    ]
    assert limits[0] == limits[1] and len(limits[0]) == STEPS


def test_noise_belongs_to_an_element_whatever_rank_has_it():
    whole = standard_normal("7/3/a.weight", torch.arange(24))
    shape = torch.Size((4, 6))
    shard, _ = Shard.split(shape, dim=1, index=1, count=3)
    place = ElementRange("a.weight", shard, start=3, numel=4)
    columns = whole.view(4, 6)[:, 2:4].reshape(-1)
    torch.testing.assert_close(
        standard_normal("7/3/a.weight", place.indices(torch.device("cpu"))),
        columns[3:7],
        rtol=0,
        atol=0,
    )


def test_noise_is_normal_and_differs_by_key():
    count = 200_000
    numbers = standard_normal("1/0/x", torch.arange(count)).double()
    other = standard_normal("1/1/x", torch.arange(count)).double()
    assert abs(numbers.mean()) < 4 / count**0.5 and abs(numbers.std() - 1) < 0.01
    assert abs((numbers * other).mean()) < 4 / count**0.5
    assert abs((numbers[1:] * numbers[:-1]).mean()) < 4 / count**0.5
    for limit, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):  # of a normal distribution
        assert abs(float((numbers.abs() > limit).double().mean()) - share) < 0.004


def test_scaled_gradients_are_changed_as_if_they_were_not():
    config = GradientsConfig(clip_value=0.5, noise=0.01)
    values = torch.linspace(-1, 1, 9)
    scaled = values * 8
    place = ElementRange("a", None, 0, 9)
    for tensor, scale in ((values, 1.0), (scaled, 8.0)):
        change = elementwise_change(config, seed=1, update=2, scale=scale)
        assert change is not None
        change(place, tensor)
    torch.testing.assert_close(scaled / 8, values)
    assert elementwise_change(GradientsConfig(), seed=1, update=2, scale=1.0) is None


def test_the_history_of_norms_has_its_window_and_goes_on_from_a_checkpoint():
    config = GradientsConfig(
        adaptive_clipping=AdaptiveClipping.percentile, adaptive_percentile=50, adaptive_window=3
    )
    history = NormHistory(config)
    for norm in (100.0, 1.0, 2.0, 3.0):
        history.add(norm)
    assert history.state() == [1.0, 2.0, 3.0] and history.limit(9.0) == 3.0  # of 2, 3 and 9
    resumed = NormHistory(config)
    resumed.restore(history.state())
    assert resumed.limit(9.0) == 3.0
    off = NormHistory(GradientsConfig())
    off.add(1.0)
    assert off.state() == [] and off.limit(2.0) is None


def test_adaptive_clipping_replaces_fixed_clipping_after_enough_norms():
    """Adaptive clipping replaces `optimizer.gradient_clipping` once it has enough norms."""
    limits = {}
    for kind in AdaptiveClipping:
        config = RunConfig()
        config.optimizer.gradient_clipping = 1.0
        config.gradients.adaptive_clipping = kind
        history = NormHistory.of(config)
        limits[kind] = []
        for norm in (8.0, 4.0, 0.2):
            limits[kind].append(history.limit(norm))
            history.add(norm)
        assert history.limit(None) == history.limit(float("inf")) == 1.0
    assert limits[AdaptiveClipping.none] == [1.0, 1.0, 1.0]
    assert limits[AdaptiveClipping.percentile] == pytest.approx([8.0, 4.4, 0.96])
    assert limits[AdaptiveClipping.mean] == pytest.approx([1.0, 12.0, 9.0])


def test_norms_of_a_partly_offloaded_gradient_are_read_from_the_device_at_once():
    """meta stands for it: some sub-groups of a parameter group are there, some in host memory."""
    host, device = torch.tensor(2.0), torch.empty((), device="meta")
    assert _on_one_device([host, device, host]).device.type == "meta"
    assert _on_one_device([host, host.double()]).tolist() == [2.0, 2.0]
    assert _on_one_device([]).tolist() == []
