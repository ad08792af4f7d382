"""A plan's own JSON, checked by the same rules as anybody's, with what the user passed through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainctl.config.derived import Derived
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.plan.deepspeed import flatten
from trainctl.plan.deepspeed_rules import Surroundings, check
from trainctl.plan.types import Mesh


def check_own_json(
    config: RunConfig,
    hardware: Hardware,
    mesh: Mesh,
    json: Mapping[str, Any],
    settings: tuple[Derived, ...],
) -> Iterator[Finding]:
    """What DeepSpeed would refuse or misread in the JSON of a plan.

    A finding about a key of the user's `deepspeed` section names it there; an error about another
    key names the configuration key that it comes from. Warnings about what trainctl writes itself
    are left out: it writes them knowingly.

    Args:
        config: The configuration.
        hardware: Where it will run.
        mesh: Its layout: the script's own mpu, as DeepSpeed sees it.
        json: The rendered JSON.
        settings: Every key of it with its reason.
    """
    around = Surroundings(
        world_size=mesh.world_size,
        data_parallel_size=mesh.data,
        devices_per_node=hardware.devices_per_node,
        accelerator=hardware.accelerator,
        pipeline_stages=mesh.pipeline,
        own_trainer=config.trains_itself,
    )
    users = [key for key, _ in flatten(config.deepspeed)]
    for finding in check(json, around):
        if any(_overlap(finding.key, key) for key in users):
            yield replace(finding, key=f"deepspeed.{finding.key}")
        elif finding.is_error:
            yield replace(finding, key=_comes_from(finding.key, settings))


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _comes_from(key: str, settings: tuple[Derived, ...]) -> str:
    """The configuration key that a key of the JSON is derived from; empty if there is none."""
    near = (setting for setting in settings if _overlap(key, setting.key))
    return next((setting.sources[0] for setting in near if setting.sources), "")
