"""Entry point of the DeepSpeed engine for the trainer."""

from __future__ import annotations

import logging

import deepspeed
import torch
from torch import nn

from trainctl.engines.deepspeed.engine import DeepSpeedEngine
from trainctl.engines.deepspeed.partition import Partitioner
from trainctl.engines.deepspeed.pipeline import PipelineEngine
from trainctl.engines.deepspeed.process import start_process
from trainctl.engines.deepspeed.swap import with_own_swap_folder
from trainctl.engines.deepspeed.zenflow import ZenFlowEngine
from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.process import Process
from trainctl.engines.protocol import Engine, Job, MakeParameter
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths


class DeepSpeedBackend:
    """Entry point of the DeepSpeed engine (`trainctl.engines.protocol.EngineBackend`)."""

    def start_process(self, plan: RunPlan) -> Process:
        return start_process(plan)

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
