"""Joining the other ranks: DeepSpeed wraps torch's process groups in a layer of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from trainctl.engines import declared
from trainctl.engines.process import Process, compute_deterministically
from trainctl.plan.types import RunPlan
from trainctl.runs.processes import STORE_VARIABLE


def start_process(plan: RunPlan) -> Process:
    """Join the ranks that the agent started, from the environment that it set."""
    declared.apply(plan.config)
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local_rank)
    if plan.config.training.deterministic:
        compute_deterministically()
    timeout = timedelta(seconds=plan.config.launcher.communication_timeout_seconds)
    deepspeed.init_distributed(
        dist_backend="gloo" if accelerator.device_name() == "cpu" else "nccl",
        timeout=timeout,
        **(_meeting_in_a_file() if STORE_VARIABLE in os.environ else {}),
    )
    return Process(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device(accelerator.device_name(local_rank)),
        control=dist.new_group(backend="gloo", timeout=timeout),
        timeout=timeout,
    )


def _meeting_in_a_file() -> dict[str, Any]:
    """Arguments of `init_distributed` for ranks that meet in a file (`agent.rendezvous`).

    By a scheme of our own: torch's `file://` takes no path with a `?` or `#` in it.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def meet(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.FileStore(os.environ[STORE_VARIABLE], world_size), rank, world_size

    dist.register_rendezvous_handler("trainctl", meet)
    return {"init_method": "trainctl://", "rank": rank, "world_size": world_size}
