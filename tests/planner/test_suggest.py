"""What would fit: each suggestion does, keeps the global batch, and comes in time."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from test_assess import GIB, H100, llama_7b

from trainctl.config.schema import (
    Accelerator,
    CheckpointingMode,
    LauncherKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.planner.assess import assess
from trainctl.planner.suggest import Suggestion, what_fits

ENUMS = {
    "activation_checkpointing.mode": CheckpointingMode,
    "offload.optimizer": OffloadDevice,
    "offload.parameters": OffloadDevice,
    "launcher.kind": LauncherKind,
}


def apply(
    suggestion: Suggestion, config: RunConfig, hardware: Hardware
) -> tuple[RunConfig, Hardware]:
    """What the user gets who pastes the overrides."""
    config = deepcopy(config)
    for override in suggestion.overrides:
        key, value = override.split("=")
        section, name = key.split(".")
        typed = ENUMS[key](value) if key in ENUMS else int(value)
        setattr(getattr(config, section), name, typed)
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
    suggestions = what_fits(config, hardware)
    assert 0 < len(suggestions) <= 4
    for suggestion in suggestions:
        result = assess(*apply(suggestion, config, hardware))
        assert result.fits, suggestion
        assert result.plan is not None
        assert result.budget is not None
        assert result.plan.batch.global_batch_size == before.plan.batch.global_batch_size
        assert result.budget.device_peak_bytes == suggestion.peak_bytes


def test_a_single_change_comes_before_combinations() -> None:
    suggestions = what_fits(*CASES["large micro batch"])
    first = {override.partition("=")[0] for override in suggestions[0].overrides}
    assert first in (
        {"training.micro_batch_size", "training.gradient_accumulation_steps"},
        {"activation_checkpointing.mode"},
    )


def test_no_suggestion_only_adds_to_an_earlier_one() -> None:
    kept = [set(suggestion.overrides) for suggestion in what_fits(*CASES["one small card"])]
    for index, later in enumerate(kept):
        assert not any(earlier <= later for earlier in kept[:index])


def test_one_small_card_needs_the_host() -> None:
    for suggestion in what_fits(*CASES["one small card"]):
        assert "offload.optimizer=cpu" in suggestion.overrides


def test_nothing_to_suggest() -> None:
    fitting = llama_7b(stage=3)
    assert what_fits(fitting, H100) == []
    illegal = llama_7b(stage=0)
    illegal.parallelism.tensor = 3
    assert what_fits(illegal, H100) == []
    assert what_fits(llama_7b(stage=0), replace(H100, device_memory_bytes=None)) == []
    hopeless = llama_7b(stage=0)
    hopeless.model.num_layers = 100_000
    assert what_fits(hopeless, H100) == []


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
    for suggestion in what_fits(config, cpu):
        assert not any(o.startswith(("offload", "hardware")) for o in suggestion.overrides)


def test_gives_up_on_a_model_that_nothing_makes_fit() -> None:
    config = too_large()
    config.model.num_layers = 100_000
    assert what_fits(config, H100) == []
