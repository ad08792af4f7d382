"""Startup of a rank through DeepSpeed, which wraps torch's process groups in a layer of its own."""

from __future__ import annotations

import os
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from trainctl.engines import patch_checks as declared
from trainctl.engines.cpu_matmul import use_fp32_cpu_products
from trainctl.engines.process import Process, compute_deterministically, rendezvous_arguments
from trainctl.plan.types import RunPlan


def start_process(plan: RunPlan) -> Process:
    """Join the ranks that the agent started, using the environment that it set."""
    declared.apply(plan.config)
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local_rank)
    if plan.config.training.deterministic:
        compute_deterministically()
    device = torch.device(accelerator.device_name(local_rank))
    use_fp32_cpu_products(plan.config.precision, device)
    timeout = timedelta(seconds=plan.config.launcher.communication_timeout_seconds)
    deepspeed.init_distributed(
        dist_backend="gloo" if accelerator.device_name() == "cpu" else "nccl",
        timeout=timeout,
        **rendezvous_arguments(),
    )
    if accelerator.device_name() == "cpu":
        # Without LOCAL_SIZE (ranks of a node), DeepSpeed starts a program that counts them at each
        # reduction of ZeRO 3. It is set only now: set before `init_distributed`, it would make
        # DeepSpeed open files in shared memory for an all-reduce that training does not use.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Process(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
        timeout=timeout,
    )
