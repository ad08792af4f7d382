"""ZenFlow on a CPU, which DeepSpeed needs no device for at ZeRO 1 and 2.

With an update in host memory at every step, and columns chosen once, it is AdamW to the last digits
that fp32 has, whichever columns are updated where: so the curve tells whether weights, gradients,
decay and learning rates meet where they should.
"""

import shutil

import pytest
import torch
from fork_server import RanksFailed
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.registry import new_section
from trainctl.config.schema import DataType, OffloadDevice
from trainctl.engines.shards import Fragment, Shard, read_whole, split_transposed
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest, verify
from trainctl.runs.records import read_events

STEPS = 8

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]  # CPUAdam is compiled when first used


def plan(world_size=2, *, stage=2, zenflow=True, compute="fp32", recompute=False, **options):
    config = tiny_config(steps=STEPS, gradient_accumulation_steps=1, sequence_length=32)
    config.precision.compute = DataType(compute)
    config.optimizer.lr = 1e-3
    config.optimizer.gradient_clipping = 0.0
    config.schedule.warmup_steps = 2
    config.zero_stage.stage = stage
    config.zero_stage.reduce_bucket_size = 12_000  # several buckets; the embedding is larger
    if recompute:
        config.activation_checkpointing = new_section("activation_checkpointing", "full")
    if zenflow:
        config.offload.optimizer = OffloadDevice.cpu
        config.offload.zenflow = True
        for name, value in options.items():
            setattr(config.offload, f"zenflow_{name}", value)
    return tiny_plan(config, world_size)


def trained(folder, name, *plans):
    """Train a run with one attempt for each plan, and return its paths."""
    run = RunPaths(folder / name)
    for number, each in enumerate(plans, 1):
        train_cases(each.mesh.world_size, [Case(each, run, attempt=number)])
    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """AdamW without ZenFlow, in fp32."""
    return trained(tmp_path_factory.mktemp("adamw"), "run", plan(stage=1, zenflow=False))


def assert_same_curve(run, reference):
    assert len(curve(run)) == STEPS
    for step, (loss, norm) in curve(reference).items():
        assert curve(run)[step] == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-5))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranges_of_a_transposed_matrix_come_back_from_their_shards(ranks):
    shape = torch.Size((5, 7))
    whole = torch.arange(35, dtype=torch.float32).view(shape)
    flat = whole.t().reshape(-1)
    parts: dict[Shard, list] = {}
    size = -(-35 // ranks)
    for start in range(0, 35, size):
        mine = flat[start : start + size]
        range_of_rank = Fragment("w", start, mine.numel(), 0, 0, owned=True)
        for fragment in split_transposed(range_of_rank, shape):
            parts.setdefault(fragment.shard, []).append(
                (fragment.start, fragment.of(mine).reshape(-1))
            )

    def reader(pieces):
        values = torch.cat([values for _, values in sorted(pieces, key=lambda each: each[0])])
        return lambda start, end: values[start:end]

    found = read_whole({shard: reader(pieces) for shard, pieces in parts.items()}, 0, 35)
    assert torch.equal(found.view(shape), whole)
    assert len(parts) <= 3 * ranks  # not one for each column


class TestTraining:
    pytestmark = SLOW

    def test_with_an_update_at_each_step_it_is_adamw(self, tmp_path, reference):
        for stage, options in ((1, {}), (2, {}), (2, {"recompute": True})):
            folder = tmp_path / f"{stage}-{len(options)}"
            run = trained(folder, "run", plan(stage=stage, update_interval=1, **options))
            assert_same_curve(run, reference)
        losses = [loss for loss, _ in curve(reference).values()]
        assert losses[-1] < losses[0] - 0.3

    def test_deepspeed_alone_scrambles_the_weights(self, tmp_path):
        """TC249; when this fails, DeepSpeed has been repaired."""
        with pytest.raises(RanksFailed, match="ZenFlow changed the weights"):
            train_cases(
                2,
                [Case(plan(), RunPaths(tmp_path / "run"))],
                probe="format_probe:assemble_with_zenflow_as_it_is",
            )

    def test_with_nearly_all_columns_on_the_device_it_nearly_is(self, tmp_path, reference):
        """Nothing is updated in host memory here; a schedule that came a step late would show."""
        run = trained(tmp_path, "zenflow", plan(topk_ratio=0.99, update_interval=100))
        for step, (loss, _) in curve(reference).items():
            found, norm = curve(run)[step]
            assert found == pytest.approx(loss, abs=0.02) and norm is None

    def test_a_zenflow_run_resumes_without_zenflow(self, tmp_path, reference):
        """A checkpoint holds the whole optimizer: matrices in their own orientation, columns up to
        date.
        """
        first = with_stop(plan(update_interval=1), 4)
        moved = trained(tmp_path, "moved", first, plan(1, stage=3, zenflow=False))
        assert_same_curve(moved, reference)
        assert all(verify(info.path) == [] for info in list_checkpoints(moved))

    @pytest.mark.parametrize("compute", ["fp32", "bf16"])
    def test_intervals(self, tmp_path, compute):
        """Loss falls, and a step has a norm where host memory has had its update."""
        every = plan(stage=1, compute=compute, update_interval=3, select_interval=6, warmup_steps=2)
        run = trained(tmp_path, "every", every)
        steps = [event for event in read_events(run.events) if event["event"] == "step"]
        assert [e["step"] for e in steps if e["grad_norm"] is not None] == [1, 2, 5, 6, 8]
        assert all(0.1 < e["grad_norm"] < 10 for e in steps if e["grad_norm"] is not None)
        assert not any(e.get("skipped") for e in steps)
        assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
        by_gradients = trained(tmp_path, "auto", plan(compute=compute))
        losses = [loss for loss, _ in curve(by_gradients).values()]
        assert losses[-1] < losses[0] - 0.1

    @pytest.mark.parametrize("compute", ["fp32", "bf16"])
    def test_a_resume_starts_with_the_same_weights(self, tmp_path, compute):
        """Between updates, and on another layout; what follows differs, the columns being new."""
        whole = plan(compute=compute, update_interval=4, topk_ratio=0.3)
        expected = curve(trained(tmp_path, "whole", whole))
        begun = trained(tmp_path, "begun", with_stop(whole, 6))
        for name, later in (
            ("same", whole),
            ("other", plan(1, stage=1, compute=compute, update_interval=2)),
            ("without", plan(stage=3, zenflow=False, compute=compute)),
        ):
            run = RunPaths(tmp_path / name)
            shutil.copytree(begun.root, run.root)
            train_cases(later.mesh.world_size, [Case(later, run, attempt=2)])
            allowed = {"same": 0.0, "fp32": 1e-5, "bf16": 2e-3}[name if name == "same" else compute]
            assert curve(run)[7][0] == pytest.approx(expected[7][0], rel=0, abs=allowed)
            assert curve(run)[8][0] == pytest.approx(expected[8][0], abs=0.2)
            if name == "other":  # it counts all steps, for the correction of Adam's bias
                newest = list_checkpoints(run)[-1]
                assert read_manifest(newest.path)["scalars"] == {"step": 8.0}
