"""A plan's own DeepSpeed JSON as a case of the rules, in the names of config keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainctl.config.derived import Derived
from trainctl.config.schema import RunConfig
from trainctl.hardware import Hardware
from trainctl.plan.deepspeed import render
from trainctl.plan.deepspeed_table import value_of
from trainctl.plan.types import Mesh
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed.names import Names, plain
from trainctl.rules.passed_keys import CONFIG_KEYS

OPTIONS = {"zero_stage.stage": "zero_stage", "optimizer.kind": "optimizer"}
"""Groups whose option has the same name as the value of a key."""


class PlanNames(Names):
    """Names for a plan's JSON: the config keys that its keys are derived from, as typed."""

    def __init__(self, config: RunConfig, passed: Sequence[Derived] = ()) -> None:
        self._config = config
        self._passed = [setting.key for setting in passed]

    def passes(self, key: str) -> bool:
        """Return True if the user passes through the JSON key, a part of it, or its section."""
        return any(overlap(key, other) for other in self._passed)

    def key(self, key: str) -> str:
        return f"deepspeed.{key}" if self.passes(key) else CONFIG_KEYS.get(key, key)

    def setting(self, key: str, value: Any) -> str:
        typed = None if self.passes(key) else value_of(self._config, CONFIG_KEYS.get(key, ""))
        return super().setting(self.key(key), value if typed is None else typed)

    def fix(self, key: str, value: Any) -> str:
        ours = self.key(key)
        if ours in OPTIONS:
            return f"{OPTIONS[ours]}={plain(value).lower()}"
        return super().fix(ours, value)

    def stages(self, count: int) -> str:
        return f"parallelism.pipeline={count}"


def plan_json_case(
    config: RunConfig,
    hardware: Hardware,
    mesh: Mesh | None,
    settings: Sequence[Derived],
    passed: Sequence[Derived] = (),
) -> Case:
    """Build the case of a plan's JSON, as the common rules check it.

    `hardware` is the hardware of the run. `mesh` takes the place of the script's own mpu for
    DeepSpeed; None if no mesh is possible. `settings` are the JSON keys that trainctl sets, and
    `passed` those that the user passes through.
    """
    around = JsonContext(
        world_size=hardware.world_size,
        data_parallel_size=None if mesh is None else mesh.data,
        devices_per_node=hardware.devices_per_node,
        accelerator=hardware.accelerator,
        pipeline_stages=config.parallelism.pipeline,
        trainctl_trainer=config.trains_itself,
    )
    return Case(render((*settings, *passed)), around, names=PlanNames(config, passed))


def overlap(key: str, other: str) -> bool:
    """Return True if two dotted keys are equal, or one is inside the section named by the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
