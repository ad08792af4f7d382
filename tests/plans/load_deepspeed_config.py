"""Run as a process: loads DeepSpeed JSONs at the world size that each is for.

Reads a list of cases from standard input and writes, for each, what the installed DeepSpeed made of
it. The process group is torch's fake one: this process is rank 0 of a world without other ranks, so
that the batch check of a 64-rank config runs on one core. The mpu is what the trainer hands it:
DeepSpeed's own pipeline grid, or else our mesh.
"""

import json
import sys
from datetime import timedelta

import deepspeed
import torch.distributed
from deepspeed.comm import comm
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from deepspeed.utils import groups
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainctl.engines.deepspeed.process_groups import model_parallel_unit
from trainctl.engines.process import join_mesh
from trainctl.plans.types import Mesh

# Its shared-memory all-reduce would be compiled first; nothing is communicated here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def layout(mesh: dict[str, int]) -> object | None:
    """Return the mpu that `deepspeed.initialize` is given, or makes, for this mesh."""
    if mesh["pipeline"] > 1:
        topology = PipeModelDataParallelTopology(
            num_pp=mesh["pipeline"], num_mp=mesh["tensor"], num_dp=mesh["data"]
        )
        return PipelineParallelGrid(topology=topology)
    return model_parallel_unit(join_mesh(Mesh(**mesh), 0, timedelta(seconds=60)))


def optimizer_of(config: DeepSpeedConfig) -> str | None:
    """Return DeepSpeed's class for the optimizer block; None if it would compile one."""
    block = config.optimizer_params
    if block is None or config.optimizer_name in ("lion", "lamb"):
        return None
    if config.zero_config.offload_optimizer is not None:
        return None
    engine = object.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine._config, engine.client_optimizer = config, None
    engine.has_moe_layers = engine.zenflow = False
    matrix = torch.nn.Parameter(torch.zeros(4, 4))
    matrix.use_muon = True
    optimizer = engine._configure_basic_optimizer([matrix])
    return type(optimizer).__name__


def load(case: dict) -> dict:
    mesh = case["mesh"]
    world_size = mesh["data"] * mesh["tensor"] * mesh["pipeline"] * mesh["sequence"]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    comm.cdb = TorchBackend("fake", timedelta(seconds=60), None)
    try:
        config = DeepSpeedConfig(case["json"], mpu=layout(mesh) if case["mpu"] else None)
        return {
            "data_parallel_size": config.world_size,
            "train_batch_size": config.train_batch_size,
            "gradient_clipping": config.gradient_clipping,
            "zero_stage": int(config.zero_optimization_stage),
            "optimizer": optimizer_of(config),
        }
    except Exception as error:  # the test compares what DeepSpeed said
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        groups._release_process_group_references()
        torch.distributed.destroy_process_group()
        comm.cdb = None


if __name__ == "__main__":
    sys.stdout, answers = sys.stderr, sys.stdout  # DeepSpeed prints
    json.dump([load(case) for case in json.load(sys.stdin)], answers)
