"""Entry point of the FSDP2 engine for the trainer."""

from __future__ import annotations

import torch
from torch import nn

from trainctl.engines.fsdp2.engine import Fsdp2Engine
from trainctl.engines.fsdp2.process import start_process
from trainctl.engines.fsdp2.settings import Settings
from trainctl.engines.fsdp2.shards import ShardMaker
from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.process import Process
from trainctl.engines.protocol import Engine, Job, MakeParameter
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths


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
