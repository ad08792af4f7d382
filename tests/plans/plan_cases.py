"""Configs and hardware for the tests of the plan."""

from __future__ import annotations

from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.keys import leaves
from trainctl.config.schema import Accelerator, RunConfig, walk_leaves
from trainctl.hardware import Hardware


def config_with(**changes: Any) -> RunConfig:
    """Return a legal configuration of 100 steps with changes (`zero_stage__stage=3`; enums by
    value).
    """
    plain = to_plain(RunConfig())
    plain["training"]["steps"] = 100
    for key, value in changes.items():
        *sections, name = key.split("__")
        target = plain
        for section in sections:
            target = target[section]
        assert key.replace("__", ".") in leaves(), key
        target[name] = value
    return from_plain(RunConfig, plain)


def gpus(devices: int = 8, nodes: int = 1, **facts: Any) -> Hardware:
    """Declared GPUs."""
    prefix = f"{nodes}x{devices}x" if nodes > 1 else f"{devices}x"
    return Hardware(
        name=f"{prefix}h100-80g",
        accelerator=Accelerator.cuda,
        nodes=nodes,
        devices_per_node=devices,
        **{"supports_fp8": True, **facts},
    )


def cpus(processes: int = 2) -> Hardware:
    return Hardware(
        name=f"{processes}xcpu",
        accelerator=Accelerator.cpu,
        nodes=1,
        devices_per_node=processes,
    )


def keys(config: RunConfig) -> set[str]:
    return {key for key, _, _ in walk_leaves(config)}
