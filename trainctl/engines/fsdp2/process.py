"""Startup of a rank with torch's process groups alone."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from trainctl.config.schema import Accelerator
from trainctl.engines import patch_checks as declared
from trainctl.engines.cpu_matmul import use_fp32_cpu_products
from trainctl.engines.process import Process, compute_deterministically, rendezvous_arguments
from trainctl.plan.types import RunPlan


def start_process(plan: RunPlan) -> Process:
    """Join the ranks that the agent started, using the environment that it set."""
    declared.apply(plan.config)
    device = torch.device("cpu")
    if plan.hardware.accelerator is not Accelerator.cpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if plan.config.training.deterministic:
        compute_deterministically()
    use_fp32_cpu_products(plan.config.precision, device)
    timeout = timedelta(seconds=plan.config.launcher.communication_timeout_seconds)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timeout, **rendezvous_arguments())
    return Process(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
        timeout=timeout,
    )
