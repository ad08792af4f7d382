"""Entry point of the FSDP2 engine for the trainer."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from trainctl.config.schema import Accelerator
from trainctl.engines import patch_checks as declared
from trainctl.engines.cpu_matmul import use_fp32_cpu_products
from trainctl.engines.fsdp2.engine import Fsdp2Engine
from trainctl.engines.fsdp2.shards import Settings, ShardMaker
from trainctl.engines.process import (
    Process,
    ProcessMesh,
    compute_deterministically,
    joined_process,
    rendezvous_arguments,
)
from trainctl.engines.protocol import Engine, Job, MakeParameter
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths


def start_process(plan: RunPlan) -> Process:
    """Join the ranks that the agent started, using the environment that it set."""
    declared.apply_patches(plan.config)
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
    return joined_process(device, timeout)


class Fsdp2Backend:
    """Entry point of the FSDP2 engine (`trainctl.engines.protocol.EngineBackend`)."""

    def start_process(self, plan: RunPlan) -> Process:
        return start_process(plan)

    def settle_plan(self, plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
        """Return the plan unchanged: nothing in it depends on the machine."""
        return plan

    def parameter_maker(
        self, plan: RunPlan, skeleton: nn.Module, device: torch.device, mesh: ProcessMesh
    ) -> MakeParameter | None:
        place = torch.device("cpu") if Settings.of(plan).offload else device
        return ShardMaker(mesh.replicas, place)

    def build(self, job: Job) -> Engine:
        return Fsdp2Engine(job)
