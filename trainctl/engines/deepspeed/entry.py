"""Entry point of the DeepSpeed engine for the trainer."""

from __future__ import annotations

import logging
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from trainctl.engines import patch_checks as declared
from trainctl.engines.deepspeed.engine import DeepSpeedEngine, ZenFlowEngine, with_own_swap_folder
from trainctl.engines.deepspeed.partition import Partitioner
from trainctl.engines.deepspeed.pipeline import PipelineEngine
from trainctl.engines.process import Process, ProcessMesh, start_process
from trainctl.engines.protocol import Engine, Job, MakeParameter
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths


class DeepSpeedBackend:
    """Entry point of the DeepSpeed engine (`trainctl.engines.protocol.EngineBackend`)."""

    def start_process(self, plan: RunPlan) -> Process:
        declared.apply_patches(plan.config)
        accelerator = get_accelerator()
        local_rank = int(os.environ["LOCAL_RANK"])
        accelerator.set_device(local_rank)
        device = torch.device(accelerator.device_name(local_rank))
        process = start_process(plan, device, deepspeed.init_distributed)
        if device.type == "cpu":
            # Without LOCAL_SIZE (ranks of a node), DeepSpeed starts a program that counts them at
            # each reduction of ZeRO 3. It is set only now: set before `init_distributed`, it would
            # make DeepSpeed open files in shared memory for an all-reduce that training does not
            # use.
            os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return process

    def settle_plan(self, plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
        """Return the plan with a swap folder of its own, and set the log level of DeepSpeed."""
        level = plan.config.logging.deepspeed_level.upper()
        deepspeed.utils.logger.setLevel(logging.getLevelName(level))
        return with_own_swap_folder(plan, run, process)

    def parameter_maker(
        self, plan: RunPlan, skeleton: nn.Module, device: torch.device, mesh: ProcessMesh
    ) -> MakeParameter | None:
        if plan.config.zero_stage.stage < 3:
            return None
        return Partitioner(plan.deepspeed, skeleton, device, mesh)

    def build(self, job: Job) -> Engine:
        kind = ZenFlowEngine if job.plan.config.offload.zenflow else DeepSpeedEngine
        return (PipelineEngine if job.mesh.pipeline.size > 1 else kind)(job)
