"""The search: all it finds validates and fits, nothing faster is left out, and it gives up well."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise, product
from typing import Any

import pytest
from throughput_rows import config_of, hardware_of

from trainctl.config.registry import list_kinds, new_section
from trainctl.config.schema import (
    CompileKind,
    CrossEntropyKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.hardware import Hardware
from trainctl.memory.budget import device_budget
from trainctl.plans.types import Mesh
from trainctl.tuning.assess import Assessment, assess
from trainctl.tuning.search import MOST_BUDGETS, FoundPlan, search
from trainctl.tuning.space import MOST_ROUNDED, RESOLUTION, Space
from trainctl.tuning.speed import time_variant, with_values

GIB = 2**30
LLAMA_7B: dict[str, Any] = {
    "model.name": "llama-7b",
    "model.hidden_size": 4096,
    "model.intermediate_size": 11008,
    "model.num_layers": 32,
    "model.num_attention_heads": 32,
    "model.vocab_size": 32000,
    "model.max_position_embeddings": 65536,
    "training.sequence_length": 4096,
    "training.global_batch_size": 256,
    "training.steps": 100,
}
LLAMA_70B = LLAMA_7B | {
    "model.name": "llama-70b",
    "model.hidden_size": 8192,
    "model.intermediate_size": 28672,
    "model.num_layers": 80,
    "model.num_attention_heads": 64,
    "model.num_key_value_heads": 8,
    "model.vocab_size": 128256,
    "training.sequence_length": 8192,
    "training.global_batch_size": 512,
}

CASES = {
    "7B on a node": (LLAMA_7B, hardware_of("h100-80g", 1, 8)),
    "7B on small cards": (LLAMA_7B, hardware_of("a100-40g", 2, 4)),
    "7B on one card": (LLAMA_7B, hardware_of("rtx-4090-24g", 1, 1)),
    "7B of long sequences": (
        LLAMA_7B | {"training.sequence_length": 65536, "training.global_batch_size": 16},
        hardware_of("h100-80g", 2, 8),
    ),
    "70B on eight nodes": (LLAMA_70B, hardware_of("h100-80g", 8, 8)),
    "70B, tokens": (
        LLAMA_70B | {"training.global_batch_size": None, "training.global_batch_tokens": 4_000_000},
        hardware_of("h200-141g", 8, 8),
    ),
    "unknown memory": (LLAMA_7B, hardware_of("h100-80g", 1, 8, device_memory_bytes=None)),
}


def seconds_per_token(found: FoundPlan) -> float:
    return 1 / found.tokens_per_second


def best(values: dict[str, Any], hardware: Hardware) -> float:
    found = search(config_of(values), hardware, top=1).found
    assert found
    return seconds_per_token(found[0])


@pytest.mark.parametrize("case", CASES)
def test_every_plan_validates_and_fits_and_none_comes_twice(case: str) -> None:
    values, hardware = CASES[case]
    config = config_of(values)
    result = search(config, hardware)
    assert 0 < len(result.found) <= 5
    assert result.budgeted < MOST_BUDGETS / 2
    for better, worse in pairwise(result.found):
        assert worse.tokens_per_second <= better.tokens_per_second * (1 + RESOLUTION)
    layouts = set()
    for found in result.found:
        again = assess(with_values(config, found.values), hardware)
        assert again.plan is not None
        assert again.fits or hardware.device_memory_bytes is None
        assert again.plan == found.plan
        wanted = values["training.global_batch_tokens"] if "tokens" in case else None
        if wanted is None:
            assert again.plan.batch.global_batch_size == values["training.global_batch_size"]
        else:
            assert abs(again.plan.batch.tokens_per_step / wanted - 1) <= MOST_ROUNDED
        changed = again.plan.config
        layouts.add((again.plan.mesh, changed.zero_stage.stage, changed.offload.optimizer))
    assert len(layouts) == len(result.found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"training.sequence_length": 16384, "training.global_batch_size": 32},
            marks=pytest.mark.slow,
        ),
        pytest.param({"model.num_layers": 64}, marks=pytest.mark.slow),
    ],
    ids=["7B", "long", "13B"],
)
def test_nothing_that_fits_is_faster(changes: dict[str, Any]) -> None:
    """Against every variant of the search's own space, each assessed for itself."""
    config = config_of(LLAMA_7B | changes)
    hardware = hardware_of("h100-80g", 1, 2)
    space = Space(config, hardware, frozenset({"parallelism.sequence"}))
    fitting = [
        candidate.variant.seconds_per_token
        for candidate in space.candidates(space.offloads[0])
        if assess(candidate.variant.sketch.config, hardware).fits
    ]
    result = search(config, hardware, fixed=frozenset({"parallelism.sequence"}), top=1)
    offloads = any(value is OffloadDevice.cpu for value in result.found[0].values.values())
    assert offloads == (not fitting)
    if fitting:
        assert seconds_per_token(result.found[0]) <= min(fitting) * 1.011


@pytest.mark.parametrize("kind", list_kinds("optimizer"))
def test_the_memory_of_a_sketch_equals_that_of_its_plan(kind: str) -> None:
    """The search budgets sketches, which must know as much about each optimizer as plans do."""
    hardware = hardware_of("h100-80g", 1, 8)
    compared = 0
    for stage, away in product(range(4), (OffloadDevice.none, OffloadDevice.cpu)):
        values = {
            "optimizer.kind": kind,
            "zero_stage.stage": stage,
            "offload.optimizer": away,
            "offload.ratio": 0.5 if stage == 3 and away is OffloadDevice.cpu else 1.0,
            "training.micro_batch_size": 1,
        }
        config = config_of(LLAMA_7B | values)
        variant, real = time_variant(config, hardware), assess(config, hardware)
        if real.budget is not None and variant is not None:
            assert device_budget(variant.sketch).phases == real.budget.phases
            compared += 1
    assert compared >= 4


def test_what_a_rule_refuses_says_nothing_of_larger_variants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A larger variant needs more memory than a smaller one, but a rule may refuse the smaller
    alone.
    """

    def refuses(config: RunConfig, hardware: Hardware) -> Assessment:
        if not config.zero_stage.overlap_comm:
            problem = Finding(rule="TC000", key="zero_stage.overlap_comm", message="not so")
            return Assessment(plan=None, budget=None, findings=(problem,))
        return assess(config, hardware)

    monkeypatch.setattr("trainctl.tuning.search.assess", refuses)
    config = config_of(LLAMA_7B | {"zero_stage.stage": 1, "training.micro_batch_size": 1})
    settled = {"zero_stage.stage", "training.micro_batch_size", "parallelism"}
    fixed = frozenset({*settled, "activation_checkpointing.mode", "kernels"})
    result = search(config, hardware_of("h200-141g", 1, 8), fixed=fixed, top=1)
    assert [found.values["zero_stage.overlap_comm"] for found in result.found] == [True]


def test_an_engine_without_deepspeeds_json_is_not_told_to_overlap() -> None:
    config = config_of(LLAMA_7B | {"engine.kind": "fsdp2", "zero_stage.stage": 3})
    space = Space(config, hardware_of("h100-80g", 1, 8), frozenset())
    found = [each for offloads in space.offloads for each in islice(space.candidates(offloads), 5)]
    assert found
    assert not any("zero_stage.overlap_comm" in candidate.values for candidate in found)


@pytest.mark.parametrize(
    "engine, key, node", [("fsdp2", "shard_group_size", 8), ("deepspeed", "hpz_partition_size", 8)]
)
def test_groups_of_nodes_are_for_slow_networks(engine: str, key: str, node: int) -> None:
    values = LLAMA_7B | {"engine.kind": engine, "zero_stage.stage": 3}
    fixed = frozenset({"zero_stage.stage", "parallelism", "offload"})

    def chosen(nodes: int, network: float) -> Any:
        hardware = hardware_of("h100-80g", nodes, 8, network_gb_per_second=network)
        (found,) = search(config_of(values), hardware, fixed=fixed, top=1).found
        return found.values.get(f"zero_stage.{key}", "not tried")

    assert chosen(1, 50.0) == "not tried"
    assert chosen(4, 2.0) == node


def test_arithmetic_leaves_out_no_layout_that_fits() -> None:
    config = config_of(LLAMA_7B | {"training.global_batch_size": 8})
    hardware = hardware_of("a100-40g", 1, 4)
    space = Space(config, hardware, frozenset())
    kept = {
        candidate.layout for offloads in space.offloads for candidate in space.candidates(offloads)
    }
    fitting = 0
    none, cpu = OffloadDevice.none, OffloadDevice.cpu
    sizes = (1, 2, 3, 4)  # the sequence is too short for context ranks
    for tensor, pipeline, sequence in product(sizes, repeat=3):
        for stage, (optimizer, parameters) in product(
            range(4), ((none, none), (cpu, none), (cpu, cpu))
        ):
            values = {
                "parallelism.tensor": tensor,
                "parallelism.pipeline": pipeline,
                "parallelism.sequence": sequence,
                "zero_stage.stage": stage,
                "offload.optimizer": optimizer,
                "offload.parameters": parameters,
                "training.micro_batch_size": 1,
                "activation_checkpointing.mode": "full",
            }
            if assess(with_values(config, values), hardware).fits:
                fitting += 1
                data = hardware.world_size // (tensor * pipeline * sequence)
                mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline, sequence=sequence)
                layout = (mesh, stage, optimizer is cpu, parameters is cpu)
                assert layout in kept
    assert fitting > 20


def test_axes_that_a_model_is_refused_are_not_tried() -> None:
    window = {"model.family": "mistral", "model.sliding_window": 1024}

    def sizes(values: dict[str, Any]) -> tuple[set[int], set[int]]:
        config = config_of(LLAMA_7B | {"training.sequence_length": 65_536} | values)
        meshes = list(Space(config, hardware_of("h100-80g", 1, 8), frozenset())._meshes())
        return {mesh.sequence for mesh in meshes}, {mesh.context for mesh in meshes}

    assert sizes({}) == ({1, 2, 4, 8}, {1, 2, 4, 8})
    assert sizes(window) == ({1}, {1})
    assert sizes(window | {"model.attention": "flash_attention_2"}) == ({1, 2, 4, 8}, {1})


@pytest.mark.parametrize(
    ("changes", "is_chunked"),
    [
        ({}, True),
        ({"objective": "masked"}, True),
        ({"objective": "dpo"}, False),
        ({"objective": "grpo"}, False),
        ({"model.future_blocks": 1}, False),
        ({"script": "train.py"}, False),
    ],
)
def test_losses_and_axes_that_an_objective_is_refused_are_not_tried(
    changes: dict[str, Any], is_chunked: bool
) -> None:
    keys = {key: value for key, value in changes.items() if "." in key}
    config = config_of(LLAMA_7B | {"kernels.cross_entropy": "chunked"} | keys)
    config.objective = new_section("objective", changes.get("objective", "next_token"))
    config.script = changes.get("script")
    tried = list(Space(config, hardware_of("h100-80g", 1, 2), frozenset()).candidates([{}]))
    losses = {each.values["kernels.cross_entropy"] for each in tried}
    assert losses == {CrossEntropyKind.plain, *([CrossEntropyKind.chunked] * is_chunked)}
    meshes = {each.layout.mesh for each in tried}
    is_split = config.objective.kind in ("next_token", "masked") and not keys
    assert any(mesh.pipeline > 1 for mesh in meshes) == is_split
    assert any(mesh.sequence > 1 for mesh in meshes) == is_split


def test_a_run_without_any_legal_plan_is_told_of_memory_and_not_of_searched_keys() -> None:
    config = config_of(LLAMA_7B | {"training.global_batch_size": 32})
    config.objective, config.adapter = (
        new_section("objective", "dpo"),
        new_section("adapter", "lora"),
    )
    config.model.initial_weights = "weights"
    small = hardware_of("rtx-4090-24g", 1, 1, device_memory_bytes=16 * GIB)
    result = search(config, small)
    assert [(finding.rule, finding.key) for finding in result.findings] == [("TC159", "hardware")]


def test_more_devices_and_more_memory_never_make_it_slower() -> None:
    values = LLAMA_7B | {"training.global_batch_size": 512}
    times = [best(values, hardware_of("a100-80g", nodes, 8)) for nodes in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    h100 = hardware_of("h100-80g", 1, 8)
    sizes = [
        best(values, replace(h100, device_memory_bytes=size * GIB)) for size in (24, 40, 80, 160)
    ]
    assert all(later <= earlier * 1.011 for earlier, later in pairwise(sizes))


def test_what_the_user_has_set_stays() -> None:
    config = config_of(
        LLAMA_7B
        | {
            "zero_stage.stage": 1,
            "parallelism.tensor": 4,
            "activation_checkpointing.mode": "selective",
            "training.micro_batch_size": 2,
        }
    )
    fixed = frozenset(
        {
            "zero_stage",
            "parallelism.tensor",
            "activation_checkpointing.mode",
            "training.micro_batch_size",
        }
    )
    result = search(config, hardware_of("h100-80g", 1, 8), fixed=fixed)
    assert result.found
    for found in result.found:
        chosen = found.plan.config
        assert chosen.zero_stage.stage == 1
        assert found.plan.mesh.tensor == 4
        assert chosen.activation_checkpointing.mode == "selective"
        assert found.plan.batch.micro_batch_size == 2


def test_several_machines_are_not_started_by_the_local_launcher() -> None:
    found = search(config_of(LLAMA_7B), hardware_of("h100-80g", 2, 8), top=1).found
    assert found[0].values["launcher.kind"] == "slurm"
    kept = config_of(LLAMA_7B | {"launcher.kind": "ssh", "launcher.hosts": ["a", "b"]})
    found = search(kept, hardware_of("h100-80g", 2, 8), top=1).found
    assert found[0].plan.config.launcher.kind == "ssh"


def test_offload_is_for_what_does_not_fit_without() -> None:
    values, hardware = CASES["7B on one card"]
    for found in search(config_of(values), hardware).found:
        assert found.plan.config.offload.optimizer is OffloadDevice.cpu
    values, hardware = CASES["7B on a node"]
    for found in search(config_of(values), hardware).found:
        assert found.plan.config.offload.optimizer is OffloadDevice.none


def test_what_host_memory_has_no_room_for_goes_to_nvme() -> None:
    values = LLAMA_70B | {"training.sequence_length": 4096, "offload.nvme_path": "/nvme"}
    hardware = hardware_of("h100-80g", 1, 8, host_memory_bytes=600 * 10**9)
    (found,) = search(config_of(values), hardware, top=1).found
    assert found.plan.config.offload.optimizer is OffloadDevice.nvme


def test_a_faster_variant_that_fails_says_why() -> None:
    result = search(config_of(LLAMA_70B), hardware_of("h100-80g", 8, 8))
    rejected = [found.rejected for found in result.found if found.rejected is not None]
    assert rejected
    for found in result.found:
        if found.rejected is not None:
            assert RESOLUTION < found.rejected.saved < 1
            assert "GiB" in found.rejected.reason
            assert found.rejected.values


def test_a_faster_variant_is_compared_by_token_and_not_by_step() -> None:
    """With a batch in tokens, another micro-batch size gives another number of sequences."""
    values = LLAMA_70B | {"model.name": "llama-8b", "model.hidden_size": 4096}
    values |= {"model.intermediate_size": 14336, "model.num_layers": 32}
    values |= {"model.num_attention_heads": 32, "zero_stage.stage": 3}
    values |= {"training.global_batch_size": None, "training.global_batch_tokens": 4_000_000}
    values |= {"kernels.liger": False, "kernels.compile": CompileKind.none}
    fixed = frozenset(["zero_stage.stage", "parallelism"])
    (found,) = search(config_of(values), hardware_of("h100-80g", 1, 8), top=1, fixed=fixed).found
    assert found.rejected is not None
    other = time_variant(with_values(found.plan.config, found.rejected.values), found.plan.hardware)
    assert other is not None
    assert other.sketch.batch.tokens_per_step != found.plan.batch.tokens_per_step
    by_step = 1 - other.time.seconds / found.time.seconds
    by_token = 1 - other.seconds_per_token * found.tokens_per_second
    assert found.rejected.saved == pytest.approx(by_token)
    assert by_step > 1.5 * by_token


def test_of_equally_fast_plans_the_simpler_comes_first() -> None:
    values = LLAMA_7B | {"model.hidden_size": 768, "model.intermediate_size": 3072}
    values |= {"model.num_attention_heads": 12, "model.num_layers": 12}
    found = search(config_of(values), hardware_of("h100-80g", 1, 8)).found
    first = found[0].plan
    assert first.config.zero_stage.stage == 0
    assert found[0].tokens_per_second >= found[1].tokens_per_second * (1 - RESOLUTION)


def test_the_global_batch_is_not_a_question_of_speed() -> None:
    config = config_of(LLAMA_7B | {"training.global_batch_size": None})
    with pytest.raises(TrainctlError, match="global_batch_tokens"):
        search(config, hardware_of("h100-80g", 1, 8))


def test_accumulation_that_the_user_has_set_stays_and_a_recipes_is_replaced() -> None:
    hardware = hardware_of("h100-80g", 1, 8)
    key = "training.gradient_accumulation_steps"
    tokens = {"training.global_batch_size": None, "training.global_batch_tokens": 1_000_000}
    for size in ({"training.global_batch_size": 96}, tokens):
        config = config_of(LLAMA_7B | size | {key: 3})
        kept = search(config, hardware, fixed=frozenset({key})).found
        assert kept
        assert {found.plan.batch.gradient_accumulation_steps for found in kept} == {3}
        free = search(config, hardware).found
        assert len(free) == 5
        assert {found.plan.batch.gradient_accumulation_steps for found in free} != {3}


def test_micro_batches_fit_into_the_batches_of_a_ramp() -> None:
    """More of the faster ones do not than the search tries of what rules refuse."""
    ramp = [{"until_steps": 10, "global_batch_size": 4}]
    config = config_of(LLAMA_7B | {"training.batch_ramp": ramp, "model.num_layers": 4})
    (found,) = search(config, hardware_of("h200-141g", 1, 8), top=1).found
    assert 4 % (found.plan.batch.micro_batch_size * found.plan.mesh.data) == 0


def nothing(
    values: dict[str, Any], hardware: Hardware, fixed: frozenset[str] = frozenset()
) -> set[tuple[str, ExitCode]]:
    result = search(config_of(values), hardware, fixed=fixed)
    assert result.found == ()
    return {(finding.rule, finding.exit_code) for finding in result.findings}


def test_a_model_that_fits_nowhere() -> None:
    huge = LLAMA_70B | {"model.hidden_size": 131_072, "model.intermediate_size": 524_288}
    small = hardware_of("a100-40g", 1, 8)
    assert nothing(huge, small) == {("TC159", ExitCode.does_not_fit)}


def test_a_batch_that_no_layout_can_share_names_the_next_one_that_one_can() -> None:
    values = LLAMA_7B | {
        "training.global_batch_size": None,
        "training.global_batch_tokens": 4 * 4096,
        "training.micro_batch_size": 3,
        "zero_stage.stage": 3,
    }
    fixed = frozenset({"zero_stage", "parallelism", "training.micro_batch_size"})
    hardware = hardware_of("h100-80g", 1, 8)
    assert nothing(values, hardware, fixed) == {("TC158", ExitCode.bad_input)}
    (finding,) = search(config_of(values), hardware, fixed=fixed).findings
    assert finding.key == "training.global_batch_tokens"
    assert f"nearest legal: training.global_batch_tokens={24 * 4096}" in finding.hint
    assert "leave parallelism and zero_stage and training.micro_batch_size" in finding.hint
    mended = values | {"training.global_batch_tokens": 24 * 4096}
    assert search(config_of(mended), hardware, fixed=fixed).found


def test_memory_is_named_where_the_batch_is_not_what_is_too_small() -> None:
    """Data-parallel ranks cannot share this batch, but the others could, if they had room."""
    values = LLAMA_70B | {"training.global_batch_size": 2}
    fixed = frozenset({"offload"})
    small = hardware_of("a100-40g", 1, 8)
    assert nothing(values, small, fixed) == {("TC159", ExitCode.does_not_fit)}
    (finding,) = search(config_of(values), small, fixed=fixed).findings
    assert "weights and optimizer states alone need" in finding.message
    assert finding.hint.endswith("or leave offload to the search")


def test_what_no_layout_can_mend_is_reported_by_its_rule() -> None:
    hardware = hardware_of("h100-80g", 1, 8)
    too_long = LLAMA_7B | {"model.max_position_embeddings": 1024}
    assert ("TC021", ExitCode.bad_input) in nothing(too_long, hardware)


def test_a_model_of_no_blocks_and_one_of_a_few_parameters() -> None:
    hardware = hardware_of("h100-80g", 1, 8)
    for layers in (0, 1):
        values = LLAMA_7B | {"model.num_layers": layers}
        result = search(config_of(values), hardware)
        assert result.found or result.findings


def test_impossible_shapes_are_left_out() -> None:
    odd = LLAMA_7B | {
        "model.hidden_size": 4160,
        "model.num_attention_heads": 65,  # no even tensor size divides them
        "training.sequence_length": 4095,
        "training.global_batch_size": 240,
    }
    result = search(config_of(odd), hardware_of("h100-80g", 1, 8))
    assert result.found
    for found in result.found:
        assert found.plan.mesh.tensor == 1
        assert 4095 % found.plan.mesh.sequence == 0


def test_sliced_inputs_stay_where_the_user_asks_and_go_where_a_recipe_does() -> None:
    slices = "activation_checkpointing.partition_across_tensor_ranks"
    config = config_of(LLAMA_7B | {"activation_checkpointing.mode": "full", slices: True})
    hardware = hardware_of("h100-80g", 1, 8)
    asked = search(config, hardware, fixed=frozenset({slices}), top=2).found
    assert asked
    for found in asked:
        assert found.plan.mesh.tensor > 1
        assert found.plan.config.activation_checkpointing.partition_across_tensor_ranks
    (first,) = search(config, hardware, top=1).found
    assert first.plan.mesh.tensor == 1
    fixed = frozenset({"parallelism.tensor", "activation_checkpointing.offload_to_cpu"})
    away = with_values(config, {"activation_checkpointing.offload_to_cpu": True})
    (recomputed,) = search(away, hardware, fixed=fixed, top=1).found
    settings = recomputed.plan.config.activation_checkpointing
    assert settings.mode == "full" and recomputed.plan.mesh.tensor == 1


def test_a_recipe_of_recomputed_inputs_may_become_one_without_recomputation() -> None:
    values = LLAMA_7B | {
        "activation_checkpointing.mode": "full",
        "activation_checkpointing.offload_to_cpu": True,
    }
    config: RunConfig = config_of(values)
    result = search(config, hardware_of("h200-141g", 1, 8), top=1)
    settings = result.found[0].plan.config.activation_checkpointing
    assert settings.mode == "none"
    assert not hasattr(settings, "offload_to_cpu")
