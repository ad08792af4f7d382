"""Tests that each suggestion fits, keeps the global batch, and is found in time."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log

import pytest
from test_assess import GIB, H100, llama_7b

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    Accelerator,
    CrossEntropyKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.tuning.assess import assess
from trainctl.tuning.speed import time_variant, with_values
from trainctl.tuning.suggest import (
    CHANGED_DIMENSION_COST,
    Suggestion,
    suggest_fitting,
    suggest_for_slack,
)

ENUMS = {
    "kernels.cross_entropy": CrossEntropyKind,
    "activation_checkpointing.mode": str,
    "offload.optimizer": OffloadDevice,
    "offload.parameters": OffloadDevice,
    "launcher.kind": str,
}


def apply(
    suggestion: Suggestion, config: RunConfig, hardware: Hardware
) -> tuple[RunConfig, Hardware]:
    """Return the configuration and hardware after the user pastes the suggested overrides."""
    for override in suggestion.overrides:
        key, value = override.split("=")
        section, name = key.split(".")
        typed = ENUMS[key](value) if key in ENUMS else json.loads(value)
        config = with_values(config, {key: typed})
        if section == "hardware":
            hardware = replace(hardware, **{name: typed})
    return config, hardware


def too_large() -> RunConfig:
    config = llama_7b(stage=2)
    config.training.micro_batch_size = 8
    config.training.gradient_accumulation_steps = 2
    config.training.sequence_length = 4096
    return config


CASES = {
    "large micro batch": (too_large(), H100),
    "one small card": (
        llama_7b(stage=1),
        replace(H100, devices_per_node=1, device_memory_bytes=24 * GIB),
    ),
    "small cards": (llama_7b(stage=0), replace(H100, device_memory_bytes=40 * GIB)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_suggestion_fits_and_keeps_the_global_batch(case: str) -> None:
    config, hardware = CASES[case]
    before = assess(config, hardware)
    assert before.plan is not None
    assert not before.fits
    suggestions = suggest_fitting(config, hardware)
    assert 0 < len(suggestions) <= 4
    for suggestion in suggestions:
        result = assess(*apply(suggestion, config, hardware))
        assert result.fits, suggestion
        assert result.plan is not None
        assert result.budget is not None
        assert result.plan.batch.global_batch_size == before.plan.batch.global_batch_size
        assert result.budget.device_peak_bytes == suggestion.peak_bytes


def test_changes_are_few_and_ordered_by_what_they_cost() -> None:
    suggestions = suggest_fitting(*CASES["large micro batch"])
    dimensions = [
        {override.partition("=")[0] for override in suggestion.overrides}
        - {"training.gradient_accumulation_steps", "zero_stage.overlap_comm"}  # go with others
        for suggestion in suggestions
    ]
    assert {"training.micro_batch_size"} in dimensions
    assert len(dimensions[0]) <= 2
    costs = [
        CHANGED_DIMENSION_COST * len(kinds) - log(suggestion.speed)
        for kinds, suggestion in zip(dimensions, suggestions, strict=True)
    ]
    assert costs == sorted(costs)


def test_saved_memory_and_speed_are_against_the_configuration_as_it_is() -> None:
    config, hardware = CASES["small cards"]
    before = assess(config, hardware).budget
    now = time_variant(config, hardware)
    assert before is not None
    assert now is not None
    for suggestion in suggest_fitting(config, hardware):
        changed = apply(suggestion, config, hardware)
        after = time_variant(*changed)
        assert after is not None
        assert suggestion.saved_bytes == before.device_peak_bytes - suggestion.peak_bytes > 0
        assert suggestion.speed == pytest.approx(now.time.seconds / after.time.seconds)


def roomy() -> RunConfig:
    config = llama_7b(stage=3)
    config.training.gradient_accumulation_steps = 8
    config.activation_checkpointing = new_section("activation_checkpointing", "full")
    return config


def test_free_memory_buys_speed_and_nothing_else() -> None:
    config = roomy()
    before, now = assess(config, H100), time_variant(config, H100)
    suggestions = suggest_for_slack(config, H100)
    assert 0 < len(suggestions) <= 4
    assert before.plan is not None
    assert now is not None
    for suggestion in suggestions:
        result = assess(*apply(suggestion, config, H100))
        assert result.fits, suggestion
        assert result.plan is not None
        assert result.plan.batch.global_batch_size == before.plan.batch.global_batch_size
        assert suggestion.speed >= 1.02
    speeds = [suggestion.speed for suggestion in suggestions]
    assert speeds == sorted(speeds, reverse=True)


def test_what_does_not_fit_or_is_at_its_best_has_no_slack() -> None:
    assert suggest_for_slack(*CASES["small cards"]) == []
    assert suggest_for_slack(roomy(), replace(H100, device_memory_bytes=None)) == []
    best = roomy()
    for suggestion in suggest_for_slack(best, H100)[:1]:
        best, _ = apply(suggestion, best, H100)
    assert all(later.speed < 1.2 for later in suggest_for_slack(best, H100))


def test_a_batch_in_tokens_stays_one() -> None:
    config = too_large()
    config.training.gradient_accumulation_steps = None
    config.training.global_batch_tokens = 2_000_000
    for suggestion in suggest_fitting(config, H100):
        assert not any("accumulation" in override for override in suggestion.overrides)
        assert assess(*apply(suggestion, config, H100)).fits


def test_no_suggestion_only_adds_to_an_earlier_one() -> None:
    kept = [set(suggestion.overrides) for suggestion in suggest_fitting(*CASES["one small card"])]
    for index, later in enumerate(kept):
        assert not any(earlier <= later for earlier in kept[:index])


def test_one_small_card_needs_the_host() -> None:
    for suggestion in suggest_fitting(*CASES["one small card"]):
        assert "offload.optimizer=cpu" in suggestion.overrides


def test_nothing_to_suggest() -> None:
    fitting = llama_7b(stage=3)
    assert suggest_fitting(fitting, H100) == []
    illegal = llama_7b(stage=0)
    illegal.parallelism.tensor = 3
    assert suggest_fitting(illegal, H100) == []
    assert suggest_fitting(llama_7b(stage=0), replace(H100, device_memory_bytes=None)) == []
    hopeless = llama_7b(stage=0)
    hopeless.model.num_layers = 100_000
    assert suggest_fitting(hopeless, H100) == []


def test_on_cpu_nothing_is_offloaded_and_no_process_added() -> None:
    config = too_large()
    cpu = Hardware(
        name="2xcpu",
        accelerator=Accelerator.cpu,
        nodes=1,
        devices_per_node=2,
        device_memory_bytes=140 * GIB,
    )
    assert not assess(config, cpu).fits
    for suggestion in suggest_fitting(config, cpu):
        assert not any(o.startswith(("offload", "hardware")) for o in suggestion.overrides)


def test_gives_up_on_a_model_that_nothing_makes_fit() -> None:
    config = too_large()
    config.model.num_layers = 100_000
    assert suggest_fitting(config, H100) == []


def test_a_sequence_that_does_not_fit_is_told_of_tiles() -> None:
    config = llama_7b(stage=3)
    config.model.max_position_embeddings = config.training.sequence_length = 1 << 21
    config.training.micro_batch_size = config.training.gradient_accumulation_steps = 1
    config.parallelism.sequence = 8
    config.kernels.cross_entropy = CrossEntropyKind.chunked
    config.kernels.liger = False
    config.activation_checkpointing = new_section(
        "activation_checkpointing", "full", offload_to_cpu=True
    )
    config.offload.optimizer = OffloadDevice.cpu
    hardware = replace(H100, nodes=1, devices_per_node=8, host_memory_bytes=2000 * GIB)
    first, *_ = suggest_fitting(config, hardware)
    assert first.overrides == ("kernels.mlp_tiles=16",)


def test_an_adapter_is_suggested_last_where_there_are_weights_to_start_from() -> None:
    config, card = (
        llama_7b(stage=2),
        replace(H100, devices_per_node=1, device_memory_bytes=24 * GIB),
    )
    assert not any("adapter" in text for s in suggest_fitting(config, card) for text in s.overrides)
    config.model.initial_weights = "weights"
    *others, last = suggest_fitting(config, card)
    assert "adapter.kind=lora" in last.overrides
    assert not any("adapter" in text for s in others for text in s.overrides)
    key_values = dict(text.split("=") for text in last.overrides)
    changed = with_values(
        config,
        {
            key: ENUMS[key](value) if key in ENUMS else json.loads(value)
            for key, value in key_values.items()
            if key != "adapter.kind"
        }
        | {"adapter.kind": "lora"},
    )
    assert assess(changed, card).fits


def test_a_base_in_four_bits_is_suggested_where_lora_does_not_fit() -> None:
    config = llama_7b(stage=2)
    config.model.initial_weights = "weights"
    card = replace(H100, devices_per_node=1, device_memory_bytes=12 * GIB)
    *_, last = suggest_fitting(config, card)
    wanted = {"adapter.kind=lora", "adapter.base_weights=nf4_double"}
    assert wanted <= set(last.overrides)
    config.adapter = new_section("adapter", "lora")
    *_, last = suggest_fitting(config, card)
    assert "adapter.base_weights=nf4_double" in last.overrides
    assert "adapter.kind=lora" not in last.overrides


def test_frozen_weights_take_no_time_of_an_optimizer() -> None:
    config = llama_7b(stage=2)
    whole = time_variant(config, H100)
    config.training.freeze = ["all_but_last_blocks:4"]
    part = time_variant(config, H100)
    assert whole is not None and part is not None
    assert part.time.optimizer < 0.2 * whole.time.optimizer
    assert part.time.reduce < 0.2 * whole.time.reduce
    # A forward pass is a third of the work; four blocks of 32 go backward, and the head.
    assert 0.35 < part.time.compute / whole.time.compute < 0.5
