"""The step-time model against published throughputs, and in its directions.

Its accuracy is that of the rows kept back: no constant was ever fitted to them.
"""

from __future__ import annotations

import re
import runpy
from itertools import combinations
from statistics import median
from typing import Any

import pytest
from throughput_rows import ROOT, Row, hardware_of, plan_of, rows

from trainctl.config.compose import compose
from trainctl.config.schema import GatherUnit, RunConfig
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve
from trainctl.tuning.rates import (
    BACKWARD_HOOK,
    BLOCK_HOOKS,
    COLLECTIVE_LATENCY,
    DISPATCH,
    FORWARD_HOOK,
    KERNEL_START,
    LINK_SHARE,
    MEMORY_SHARE,
    UNFUSED_SHARE,
    UPDATE_STARTS,
    device_rates,
)
from trainctl.tuning.speed import TIME_ERROR, StepTime, step_time

FAR_OFF = {
    # Ranks that updated on the host far slower than DeepSpeed on eight H200 did.
    "a800-7b-z2-ckpt-opt-mbs1-g64": -0.60,
    "a800-7b-z3-ckpt-opt-mbs2-g64": -0.60,
    "a800-7b-z3-ckpt-opt-par-mbs4-g64": -0.62,
    # Slower than ZeRO 2 with half the micro batch, in the same table.
    "a800-7b-z3-mbs2-g64": -0.36,
    # Attention alone; its rate there is above the one measured at 8k that the row is given.
    "ds-8b-z3-offload-b200-192g-262144": 0.28,
    # A device whose memory was full: its source leaves the row out too.
    "kempner-weak-70b-8": -0.37,
    # Three quarters of the peak with recomputation, above the best product measured on an H100.
    "kempner-7b-1": 0.29,
    "kempner-175b-360": 0.29,
}
"""Rows that the model misses by more than a quarter, and by how much at most."""


def per_token(row: Row, seconds: float) -> float:
    """Device seconds of a token."""
    return seconds * row.plan.mesh.world_size / row.plan.batch.tokens_per_step


def dense() -> list[Row]:
    return [row for row in rows() if not row.has_experts and not row.is_of_run]


def kept() -> list[Row]:
    return [row for row in dense() if row.is_kept]


def tables() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in dense():
        found.setdefault(row.table, []).append(row)
    return {name: members for name, members in found.items() if len(members) > 1}


def test_measurements_are_met_within_a_quarter() -> None:
    assert not [row.name for row in dense() if not _is_met(row)]


def _is_met(row: Row) -> bool:
    limit = FAR_OFF.get(row.name)
    if limit is None:
        return abs(row.error) <= 0.25
    return 0.25 < abs(row.error) <= abs(limit) and row.error * limit > 0


def test_half_of_those_kept_back_are_met_within_a_tenth() -> None:
    errors = sorted(abs(row.error) for row in kept())
    assert len(errors) >= 80
    assert len({row.table.split()[0] for row in kept()}) >= 8
    assert median(errors) <= 0.10
    assert errors[int(0.85 * len(errors))] <= 0.25
    assert median(abs(row.error) for row in dense() if row.was_fitted) <= 0.07


def test_nine_in_ten_rows_are_within_the_range_that_is_shown() -> None:
    for measured in (dense(), kept()):
        within = sum(abs(row.error) <= TIME_ERROR for row in measured)
        assert 0.88 <= within / len(measured) <= 0.97


def test_rows_are_kept_back_by_their_table_and_never_fitted_to() -> None:
    sides: dict[str, set[bool]] = {}
    for row in rows():
        assert not (row.is_kept and row.was_fitted)
        if not row.was_fitted:
            sides.setdefault(row.table, set()).add(row.is_kept)
    assert all(len(kept) == 1 for kept in sides.values())


def test_models_with_experts_are_met_within_what_the_exchange_costs() -> None:
    """Published trainers hide a part of the exchange, which trainctl does not."""
    sparse = [row for row in rows() if row.has_experts]
    assert len(sparse) >= 18
    far = [row for row in sparse if row.plan.mesh.expert > 8 and row.plan.hardware.nodes > 8]
    assert len(far) >= 4
    for row in far:  # from 64 ranks on eight machines
        assert row.error > 0.5
        assert -0.35 < row.error_with_hidden_exchange < 0.05
    assert all(-0.7 < row.error < 0.6 for row in sparse if row not in far)
    names = {row.name: row.error for row in sparse}
    assert abs(names["mcore-mixtral-8x7b-64"]) < 0.25
    assert abs(names["olmoe-128"]) < 0.30


def test_the_documentation_has_the_tables_of_accuracy() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "benchmarks" / "speed_accuracy.py"))
    page = (ROOT / "docs" / "planning.md").read_text()
    for table in ("dense_lines", "expert_lines", "run_lines"):
        for line in script[table]():
            assert line in page


def test_zero_3_waits_for_its_hooks_on_the_host() -> None:
    small = {
        "model__hidden_size": 256,
        "model__intermediate_size": 512,
        "training__sequence_length": 256,
        "training__gradient_accumulation_steps": 1,
        "devices": 1,
    }
    first, third = (time_of(zero_stage__stage=stage, **small).compute for stage in (1, 3))
    # Seven products and two norms in each of 32 blocks, whose kernels start in between.
    hooks = 32 * 9 * (FORWARD_HOOK + BACKWARD_HOOK)
    assert third - first == pytest.approx(BLOCK_HOOKS * hooks, rel=0.01)
    each = time_of(zero_stage__stage=3, zero_stage__gather=GatherUnit.modules, **small).compute
    assert each - first == pytest.approx(hooks, rel=0.01)
    fsdp = time_of(zero_stage__stage=3, engine__kind="fsdp2", **small).compute
    assert fsdp == pytest.approx(first)
    large = {"devices": 1, "training__micro_batch_size": 8}
    assert time_of(zero_stage__stage=3, **large).compute == time_of(**large).compute
    # What `selective` keeps is chosen in Python, operation by operation, forward and again.
    kept = time_of(activation_checkpointing__mode="selective", **small)
    assert kept.compute > 1.5 * first
    assert kept.recompute >= kept.compute / 4


H100_RUNS = {
    "zero_stage=0": 32_000,
    "zero_stage=3": 14_300,
    "zero_stage=3 activation_checkpointing=selective": 6_800,
}
"""Median tokens per second of Qwen3 0.6B on one H100, by the code of then (docs/planning.md)."""


def small_model(settings: str) -> StepTime:
    """Time of a step as those runs were configured."""
    size = "sequence_length=2048 micro_batch_size=4 gradient_accumulation_steps=2"
    batch = [f"training.{each}" for each in size.split()]
    shape = "recipe=125m model=qwen3-0.6b hardware=1xh100-80g training.global_batch_size=8"
    config = compose([*shape.split(), *batch, "kernels=plain", *settings.split()]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    return step_time(plan)


@pytest.mark.parametrize("settings", H100_RUNS)
def test_small_models_are_met_with_the_host_terms_of_their_code(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ZeRO 3 gathered modules, `selective` looked at each operation, and DeepSpeed at each gradient.
    modules = "zero_stage.gather=modules" if "=3" in settings else ""
    monkeypatch.setattr("trainctl.tuning.compute.WATCHED_CALL", DISPATCH)
    starts = tuple(1e-6 * each / KERNEL_START for each in (190, 90, 90, 30))
    monkeypatch.setattr("trainctl.tuning.speed.UPDATE_STARTS", starts)
    predicted = 16_384 / small_model(f"{settings} {modules}").seconds
    assert predicted == pytest.approx(H100_RUNS[settings], rel=0.15)


def test_the_update_waits_for_the_host_tensor_by_tensor() -> None:
    # Qwen3 0.6B has eleven tensors in each of 28 blocks; the two others are neglected.
    waits = {stage: 308 * starts * KERNEL_START for stage, starts in enumerate(UPDATE_STARTS)}
    device = small_model("zero_stage=0").optimizer - waits[0]
    for stage, seconds in waits.items():
        assert small_model(f"zero_stage={stage}").optimizer - device == pytest.approx(seconds)
    halves = time_of(parallelism__pipeline=2, devices=2).optimizer
    assert halves == pytest.approx(time_of(devices=1).optimizer / 2, rel=0.1)


def test_separate_kernels_move_their_bytes_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> list[float]:
        kinds = ("kernels=plain", "kernels=liger")
        return [small_model(f"zero_stage=0 {kind}").compute for kind in kinds]

    plain, fused = seconds()
    monkeypatch.setattr("trainctl.tuning.rates.UNFUSED_SHARE", MEMORY_SHARE)
    at_full_rate, same = seconds()
    moved = 16_384 * 28 * 3 * (84 * 1024 + (16 + 36) * 24 * 128 + 10 * 3072)
    slower = moved / 3.35e12 * (1 / UNFUSED_SHARE - 1 / MEMORY_SHARE)
    assert plain - at_full_rate == pytest.approx(slower)
    assert same == fused


def test_measurements_of_a_table_come_in_the_right_order() -> None:
    right = wrong = 0
    for members in tables().values():
        for one, other in combinations(members, 2):
            measured = per_token(one, one.seconds) / per_token(other, other.seconds)
            predicted = per_token(one, one.predicted) / per_token(other, other.predicted)
            if not 0.9 < measured < 1 / 0.9:
                right += (measured > 1) == (predicted > 1)
                wrong += (measured > 1) != (predicted > 1)
    assert right + wrong > 100
    assert right / (right + wrong) >= 0.95


def test_what_the_model_would_choose_is_nearly_the_best() -> None:
    for name, members in tables().items():
        chosen = min(members, key=lambda row: per_token(row, row.predicted))
        best = min(per_token(row, row.seconds) for row in members)
        assert per_token(chosen, chosen.seconds) <= 1.15 * best, name


LLAMA_7B = {
    "model.hidden_size": 4096,
    "model.intermediate_size": 11008,
    "model.num_layers": 32,
    "model.num_attention_heads": 32,
    "model.vocab_size": 32000,
    "training.sequence_length": 4096,
    "training.micro_batch_size": 2,
    "training.gradient_accumulation_steps": 8,
    "zero_stage.stage": 1,
}


def time_of(nodes: int = 1, devices: int = 8, **changes: Any) -> StepTime:
    """Return the time of a step of Llama-7B on H100s; `zero_stage__stage=3` changes a key."""
    values = LLAMA_7B | {key.replace("__", "."): value for key, value in changes.items()}
    return step_time(plan_of(hardware_of("h100-80g", nodes, devices), values))


def test_the_parts_add_up() -> None:
    time = time_of(nodes=2, parallelism__tensor=2, parallelism__pipeline=2)
    assert time.seconds == pytest.approx(sum(time.parts.values()))
    assert min(time.parts.values()) >= 0


def test_recomputation_is_a_forward_pass_and_selective_less() -> None:
    none, full, selective = (
        time_of(activation_checkpointing__mode=mode) for mode in ("none", "full", "selective")
    )
    assert none.recompute == 0
    assert 0.25 * none.compute < full.recompute < 0.4 * none.compute
    assert 0 < selective.recompute < 0.5 * full.recompute
    every_other = time_of(
        activation_checkpointing__mode="full", activation_checkpointing__every_kth_block=2
    )
    assert every_other.recompute == pytest.approx(full.recompute / 2)


def test_tiles_multiply_the_feed_forward_layers_once_more() -> None:
    whole, tiles = time_of(), time_of(kernels__mlp_tiles=8)
    assert 1.1 < tiles.compute / whole.compute < 1.34
    assert tiles.recompute == whole.recompute == 0


def test_the_pipeline_bubble_is_that_of_1f1b() -> None:
    for micro_batches in (4, 8, 32):
        time = time_of(parallelism__pipeline=4, training__gradient_accumulation_steps=micro_batches)
        work = time.compute + time.transfer + time.reduce + time.tensor
        once = time.compute + time.transfer
        assert time.bubble == pytest.approx(once * 3 / micro_batches, rel=0.01), work


def test_links_between_machines_are_slower() -> None:
    inside = time_of(nodes=2, parallelism__tensor=8)
    across = time_of(nodes=2, devices=4, parallelism__tensor=8)
    assert across.tensor > 2 * inside.tensor  # four network cards for eight devices
    assert time_of(nodes=2, zero_stage__stage=3).seconds > 0
    # Sequence ranks lie four apart here, so four of them are on two machines.
    shared = {"parallelism__tensor": 4, "parallelism__sequence": 4}
    assert time_of(nodes=2, **shared).sequence > 2 * time_of(devices=16, **shared).sequence
    near, far = time_of(zero_stage__stage=1), time_of(nodes=8, devices=1, zero_stage__stage=1)
    assert far.reduce > 3 * near.reduce


def test_a_ring_is_hidden_by_long_chunks_and_goes_between_machines() -> None:
    """Ulysses exchanges inside a machine, and rings between machines, are faster than either
    alone."""

    def share(length: int, **axes: int) -> tuple[float, StepTime]:
        changes = {f"parallelism__{axis}": size for axis, size in axes.items()}
        changes |= {"model__num_key_value_heads": 8, "training__sequence_length": length}
        time = time_of(8, **changes)
        return time.seconds, time

    _, short = share(32_768, sequence=8, context=8)
    _, long = share(524_288, sequence=8, context=8)
    assert short.context / short.seconds > 5 * long.context / long.seconds > 0
    both, _ = share(131_072, sequence=8, context=4)
    assert both < share(131_072, sequence=32)[0] < share(131_072, context=32)[0]
    assert "context" not in share(131_072, sequence=8)[1].parts


def test_the_docs_have_what_is_predicted_of_rings() -> None:
    lines = (ROOT / "docs" / "planning.md").read_text().splitlines()
    head = next(n for n, line in enumerate(lines) if "| `context=32` |" in line)
    columns = [cell.split() for cell in lines[head].replace("`", "").split("|")[2:5]]
    batch = ["training.global_batch_size=2", "model.max_position_embeddings=1048576"]
    asked = ["recipe=8b-long-context", "hardware=8x8xh100-80g", *batch]
    for line in lines[head + 2 : head + 7]:
        length, *shown = (int(re.sub(r"\D", "", cell)) for cell in line.split("|")[1:5])
        for axes, rate in zip(columns, shown, strict=True):
            sizes = {"sequence": "1"} | dict(each.split("=") for each in axes)
            layout = [f"parallelism.{axis}={size}" for axis, size in sizes.items()]
            config = compose([*asked, f"training.sequence_length={length}", *layout]).config
            plan = resolve(config, resolve_hardware(config.hardware)).plan
            assert plan is not None
            seconds = step_time(plan).seconds
            assert 2 * length / seconds / 64 == pytest.approx(rate, abs=0.5), (length, axes)


def test_each_stage_communicates_what_it_has_to() -> None:
    first, second, third = (time_of(nodes=2, zero_stage__stage=stage) for stage in (1, 2, 3))
    assert second.reduce > 4 * first.reduce  # in each micro batch, not once in a step
    assert first.gather == second.gather == 0 < third.gather
    hidden = time_of(nodes=2, zero_stage__stage=2, zero_stage__overlap_comm=True)
    assert hidden.reduce < second.reduce


def reduced_by_shard_groups(micro_batches: int, **changes: Any) -> float:
    groups = {"engine__kind": "fsdp2", "zero_stage__stage": 3, "zero_stage__shard_group_size": 2}
    groups["training__gradient_accumulation_steps"] = micro_batches
    return time_of(nodes=8, devices=2, **(groups | changes)).reduce


AWAY = {"offload__optimizer": "cpu", "offload__parameters": "cpu"}


def test_offloaded_shard_groups_sum_their_gradients_in_each_micro_batch() -> None:
    reduce = reduced_by_shard_groups
    assert reduce(4, **AWAY) == pytest.approx(4 * reduce(1, **AWAY))
    assert reduce(4) < 2 * reduce(1)


@pytest.mark.parametrize("changes", [{}, AWAY, {"zero_stage__shard_group_size": 16}])
def test_gradients_are_reduced_once_a_step_where_the_engine_is_told_so(
    changes: dict[str, Any],
) -> None:
    once = changes | {"engine__reduce_every_micro_batch": False}
    first = reduced_by_shard_groups(1, **changes)
    assert first > 0
    assert reduced_by_shard_groups(4, **once) == pytest.approx(first)
    assert reduced_by_shard_groups(4, **changes) > 1.1 * first


def test_tensor_ranks_exchange_what_an_update_of_whole_matrices_needs() -> None:
    def update(kind: str, **changes: Any) -> float:
        return time_of(optimizer__kind=kind, **changes).optimizer

    halves = {"parallelism__tensor": 2}
    for kind in ("muon", "lamb", "adafactor"):
        assert (update(kind) == update("adamw")) == (kind != "muon")
        for stage in range(4):
            changes = {**halves, "zero_stage__stage": stage}
            assert update(kind, **changes) > update("adamw", **changes), (kind, stage)
    found = update("muon", devices=2, **halves) - update("adamw", devices=2, **halves)
    # A rank sends half of its shards of 6.5 billion weights, there and back, in bf16: two matrices
    # in each of 112 rounds. It orthogonalises half of them.
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    sent = 2 * 2 * matrices / 2 / 2 / (450e9 * LINK_SHARE) + 2 * 112 * COLLECTIVE_LATENCY
    products = 32 * 5 * 2 * 4096**2 * (4 * 3 * 4096 + 3 * (2 * 11008 + 4096)) / 2
    rates = device_rates(hardware_of("h100-80g", 1, 8), RunConfig().precision)
    assert found == pytest.approx(sent + products / rates.wide_products)


def test_a_single_device_does_not_communicate() -> None:
    time = time_of(devices=1, zero_stage__stage=3)
    assert time.tensor == time.sequence == time.gather == time.reduce == time.transfer == 0


def test_offload_costs_copies_and_a_slower_update() -> None:
    near = time_of(zero_stage__stage=3)
    cpu = time_of(zero_stage__stage=3, offload__optimizer="cpu")
    nvme = time_of(zero_stage__stage=3, offload__optimizer="nvme", offload__nvme_path="/nvme")
    half = time_of(zero_stage__stage=3, offload__optimizer="cpu", offload__ratio=0.5)
    assert near.offload == 0 < cpu.offload < nvme.offload
    assert near.optimizer < half.optimizer < cpu.optimizer
    both = time_of(zero_stage__stage=3, offload__optimizer="cpu", offload__parameters="cpu")
    assert both.seconds >= cpu.seconds


def test_fp8_is_faster_where_the_device_has_it() -> None:
    fp8 = time_of(precision__compute="fp8")
    assert fp8.compute < time_of().compute < 2 * fp8.compute
    emulated = time_of(precision__compute="fp8", precision__emulate_fp8=True)
    assert emulated.compute >= time_of().compute


def test_fewer_and_fused_kernels_are_faster() -> None:
    plain, liger = time_of(), time_of(kernels__liger=True)
    assert liger.compute < plain.compute
    fused = time_of(kernels__cross_entropy="liger_fused")
    chunked = time_of(kernels__cross_entropy="chunked")
    assert fused.compute < plain.compute < chunked.compute


def test_small_micro_batches_wait_for_the_processor() -> None:
    tiny = {"model__hidden_size": 128, "model__intermediate_size": 384}
    one = time_of(training__micro_batch_size=1, training__sequence_length=128, **tiny)
    two = time_of(training__micro_batch_size=2, training__sequence_length=128, **tiny)
    assert two.compute < 1.1 * one.compute


def test_a_model_of_nothing_and_one_of_1e13_parameters() -> None:
    shape = {"num_layers": 0, "hidden_size": 0, "intermediate_size": 0, "vocab_size": 0}
    empty = time_of(**{f"model__{name}": size for name, size in shape.items()})
    assert empty.compute == empty.recompute == 0
    huge = time_of(
        model__hidden_size=131_072, model__intermediate_size=524_288, model__num_layers=40
    )
    assert 0 < huge.seconds < float("inf")


def test_a_device_of_unknown_rates_counts_as_an_a100() -> None:
    plan = plan_of(hardware_of("t4-16g", 1, 8), LLAMA_7B | {"precision.compute": "bf16"})
    assert not device_rates(plan.hardware, plan.config.precision).is_known
    assert step_time(plan).seconds > 0
    known = hardware_of("a100-80g", 1, 8)
    assert device_rates(known, plan.config.precision).is_known
