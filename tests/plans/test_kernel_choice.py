"""Kernels that a configuration leaves open: the fastest that hardware and rules allow, and why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from trainctl.config.compose import compose
from trainctl.config.schema import CompileKind, CrossEntropyKind, KernelsConfig, RunConfig
from trainctl.hardware import resolve_hardware
from trainctl.monitor.plan_text import plan_lines, plan_rows
from trainctl.plans.types import RunPlan
from trainctl.rules.kernel_choice import with_kernels
from trainctl.rules.resolve import resolve
from trainctl.tuning.value_explanation import explain_known

GPUS = ("recipe=1b-zero1", "hardware=h100-80g", "hardware.devices_per_node=8")
LIGER = (True, "liger_fused", "none")
COMPILED = (False, "plain", "blocks")
PLAIN = (False, "plain", "none")


def resolved(*overrides: str, has_liger: bool | None = None) -> RunPlan:
    config = compose(overrides).config
    hardware = replace(resolve_hardware(config.hardware), has_liger=has_liger)
    made = resolve(config, hardware)
    assert made.plan is not None, made.findings
    return made.plan


def values(config: RunConfig) -> tuple[Any, ...]:
    kernels: KernelsConfig = config.kernels
    assert isinstance(kernels.cross_entropy, CrossEntropyKind)
    assert isinstance(kernels.compile, CompileKind)
    return kernels.liger, kernels.cross_entropy.value, kernels.compile.value


def reason(plan: RunPlan, key: str) -> str:
    return next(item.reason for item in plan.derived if item.key == f"kernels.{key}")


@pytest.mark.parametrize(
    ("overrides", "has_liger", "wanted"),
    [
        ((), None, LIGER),
        ((), True, LIGER),
        ((), False, COMPILED),
        (("zero_stage=3",), True, LIGER),
        (("zero_stage=3",), False, PLAIN),
        (("parallelism.tensor=2",), True, (True, "plain", "none")),
        (("parallelism.tensor=2",), False, PLAIN),
        (("parallelism.pipeline=2",), True, PLAIN),
        (("kernels=plain",), True, PLAIN),
        (("kernels.cross_entropy=chunked",), True, (True, "chunked", "none")),
        (("kernels.compile=blocks",), True, COMPILED),
        (("kernels.compile=none",), False, PLAIN),
        (("kernels.liger=false",), True, COMPILED),
        (("kernels.liger=false", "kernels.mlp_tiles=2"), True, PLAIN),
        (("precision=fp8",), True, COMPILED),
        (("precision=fp8", "zero_stage=3"), True, LIGER),
        (("callbacks=[layer_statistics]",), False, PLAIN),
        (("engine=fsdp2", "zero_stage=2"), True, PLAIN),
        (("hardware=cpu",), True, PLAIN),
    ],
)
def test_the_fastest_kernels_that_are_allowed_are_chosen(
    overrides: tuple[str, ...], has_liger: bool | None, wanted: tuple[Any, ...]
) -> None:
    plan = resolved(*GPUS, *overrides, has_liger=has_liger)
    assert values(plan.config) == wanted
    # What is searched and suggested is timed and budgeted with the same kernels.
    assert with_kernels(compose([*GPUS, *overrides]).config, plan.hardware).kernels == (
        plan.config.kernels
    )


def test_each_open_value_is_in_the_plan_with_its_reason() -> None:
    plan = resolved(*GPUS, has_liger=False)
    assert reason(plan, "liger") == "liger-kernel is not installed here"
    assert reason(plan, "compile") == "on GPUs, without liger-kernel"
    assert "precision.compute=fp8" in reason(resolved(*GPUS, "precision=fp8"), "compile")
    elsewhere = resolved(*GPUS)
    assert "assumed to be installed on 8xh100-80g" in reason(elsewhere, "liger")
    assert "is not compiled" in reason(
        resolved(*GPUS, "parallelism.tensor=2", has_liger=False), "compile"
    )
    assert "CPUs" in reason(resolved("recipe=tiny"), "compile")


def test_chosen_values_have_no_reason_and_stay() -> None:
    plan = resolved(*GPUS, "kernels=plain")
    assert not [item for item in plan.derived if item.key.startswith("kernels.")]
    again = resolve(resolved(*GPUS).config, replace(plan.hardware, has_liger=False)).plan
    assert again is not None and values(again.config) == LIGER  # as a resumed run's


def test_a_launch_looks_for_liger_in_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = compose(GPUS).config.hardware
    monkeypatch.setattr("trainctl.hardware.resolve.find_spec", lambda name: None)
    assert resolve_hardware(elsewhere).has_liger is None
    assert resolve_hardware(elsewhere, launches=True).has_liger is False
    monkeypatch.setattr("trainctl.hardware.resolve.find_spec", lambda name: object())
    assert resolve_hardware(elsewhere, launches=True).has_liger is True


def test_what_was_written_before_the_choice_is_plain() -> None:
    assert not KernelsConfig().is_compiled and KernelsConfig().has_all_logits


def test_why_says_what_plain_kernels_would_cost() -> None:
    composed = compose(GPUS)
    plan = resolved(*GPUS)
    told = explain_known("kernels.liger", composed, plan).reason
    speed, memory = re.findall(r"kernels=plain: (\S+)% tokens/s, (\S+) GiB", told)[0]
    assert -40 < int(speed) < -5 and float(memory) > 5
    assert f"kernels   liger, cross entropy liger_fused (plain: {speed}%" in "\n".join(
        plan_lines(plan, brief=True)
    )
    on_cpu = resolved("recipe=tiny")
    assert "kernels" not in dict(plan_rows(on_cpu))
    told = explain_known("kernels.liger", compose(["recipe=tiny"]), on_cpu).reason
    assert told == "the devices are CPUs"
