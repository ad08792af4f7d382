"""Machines, engines and formats of accelerate's `default_config.yaml`."""

from __future__ import annotations

from trainctl.migration.configs.conversions.deepspeed import (
    HYBRID,
    choose_engine,
    convert_file,
    group_size,
)
from trainctl.migration.configs.import_table import Conversion

DEEPSPEED, FSDP, PARALLEL = "deepspeed_config", "fsdp_config", "parallelism_config"

OTHER_DEVICES = ("XPU", "NPU", "MLU", "MUSA", "SDAA", "HPU", "NEURON")


def engine(source: Conversion) -> None:
    """Convert `distributed_type`: DeepSpeed, FSDP, Megatron's axes, or copies of all states."""
    kind = str(source.get("distributed_type")).upper()
    source.set("engine", "deepspeed", "distributed_type")
    if kind == "FSDP":
        _fsdp(source)
    elif kind in ("NO", "MULTI_GPU", "MULTI_CPU", "TP", "FALSE"):
        # Copies of all states, except in fp16, which DeepSpeed needs stage 1 for.
        is_fp16 = source.converted.choices.get("precision") == "fp16"
        source.set("zero_stage", "1" if is_fp16 else "0", "distributed_type")
    elif kind not in ("DEEPSPEED", "MEGATRON_LM"):
        device = kind.removeprefix("MULTI_")
        source.set("zero_stage", "0")
        source.leave("distributed_type", f"there is no device {device}", "cuda, rocm or cpu")


def _fsdp(source: Conversion) -> None:
    strategy = source.get(f"{FSDP}.fsdp_sharding_strategy")
    reshard = source.get(f"{FSDP}.fsdp_reshard_after_forward")
    if strategy is None:
        strategy = {"True": "FULL_SHARD", "False": "SHARD_GRAD_OP"}.get(str(reshard), reshard)
    name = f"{FSDP}.fsdp_sharding_strategy"
    name = name if source.given(name) else f"{FSDP}.fsdp_reshard_after_forward"
    is_hybrid = str(strategy).upper() in HYBRID
    copies = max(_size(source, "dp_replicate"), source.count("num_machines") if is_hybrid else 1)
    shards = source.get(f"{PARALLEL}.{PARALLEL}_dp_shard_size")
    ranks = source.count("num_processes") or source.world_size
    choose_engine(
        source,
        strategy,
        name=name,
        to_host=source.is_on(f"{FSDP}.fsdp_offload_params"),
        group=group_size(shards, copies, ranks) if is_hybrid or copies > 1 else None,
    )


def _size(source: Conversion, axis: str) -> int:
    return source.count(f"{PARALLEL}.{PARALLEL}_{axis}_size") or 1


def machines(source: Conversion) -> None:
    """Convert the number of machines and processes, and what starts them on several machines."""
    nodes = source.count("num_machines")
    total = source.count("num_processes") or source.world_size
    is_cpu = source.is_on("use_cpu") or source.get("distributed_type") == "MULTI_CPU"
    if is_cpu:
        source.set("hardware", "cpu", "use_cpu")
    if total is None:
        if source.given("num_processes"):
            source.leave("num_processes")
    elif total % nodes:
        source.leave(
            "num_processes",
            f"{nodes} machines do not have {total} processes alike",
            "hardware.devices_per_node=N",
        )
    else:
        source.set("hardware.devices_per_node", total // nodes, "num_processes")
    source.set("hardware.nodes", nodes, "num_machines")
    _launcher(source, nodes)


LAUNCHERS = {"openmpi": "mpi", "mpich": "mpi", "mvapich": "mpi", "impi": "mpi", "slurm": "slurm"}
"""Launcher for each of DeepSpeed's; the others go by ssh, or are started on each machine."""


def _launcher(source: Conversion, nodes: int) -> None:
    runner, hosts = f"{DEEPSPEED}.deepspeed_multinode_launcher", f"{DEEPSPEED}.deepspeed_hostfile"
    mpi_hosts = "mpirun_config.mpirun_hostfile"
    if source.given(mpi_hosts):
        source.set("launcher", "mpi", mpi_hosts)
        source.copy("launcher.mpi_hostfile", mpi_hosts)
    elif nodes > 1:
        launcher = LAUNCHERS.get(str(source.get(runner)), "ssh")
        source.set("launcher", launcher, runner if source.given(runner) else "num_machines")
        key = {"ssh": "launcher.hostfile", "mpi": "launcher.mpi_hostfile"}.get(launcher)
        if key:
            source.copy(key, hosts)
    else:
        source.ignore("there is one machine", runner, hosts)


PRECISIONS = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def precision(source: Conversion) -> None:
    """Convert `mixed_precision`; before 0.12 `fp16: true` was a key of its own."""
    name = "mixed_precision"
    wanted = str(source.get(name)).lower()
    if not source.given(name) and source.is_on("fp16"):
        name, wanted = "fp16", "fp16"
    if wanted in PRECISIONS:
        source.set("precision", PRECISIONS[wanted], name)
    else:
        source.leave(name, f"there is no format {wanted}", "precision=bf16")


def deepspeed(source: Conversion) -> None:
    """Convert the DeepSpeed section: a JSON of its own, or its stage and offload."""
    if str(source.get("distributed_type")).upper() != "DEEPSPEED":
        source.ignore("distributed_type is not DEEPSPEED", *source.keys_of("accelerate.deepspeed"))
        return
    file = f"{DEEPSPEED}.deepspeed_config_file"
    if source.given(file) and source.get(file) != "none":
        convert_file(source, file)
        return
    stage = str(source.get(f"{DEEPSPEED}.zero_stage"))
    if stage in ("0", "1", "2", "3"):
        source.set("zero_stage", stage, f"{DEEPSPEED}.zero_stage")
    else:
        source.leave(f"{DEEPSPEED}.zero_stage", f"there is no stage {stage}", "zero_stage=2")
    states = source.get(f"{DEEPSPEED}.offload_optimizer_device")
    parameters = source.get(f"{DEEPSPEED}.offload_param_device")
    for key, value in (("optimizer", states), ("param", parameters)):
        ours, name = "parameters" if key == "param" else key, f"{DEEPSPEED}.offload_{key}_device"
        if value in ("none", "cpu", "nvme"):
            source.set(f"offload.{ours}", value, name)
        else:
            source.leave(name, f"there is no device {value}", f"offload.{ours}=cpu")
        path = f"{DEEPSPEED}.offload_{key}_nvme_path"
        if value == "nvme":
            source.copy("offload.nvme_path", path)
        else:
            source.ignore("nothing is offloaded there", path)


def compiler(source: Conversion) -> None:
    """Convert `dynamo_backend`: the blocks are compiled, by torch's default backend."""
    name = "dynamo_config.dynamo_backend"
    if not source.given(name):
        return
    backend = str(source.get(name)).upper()
    if backend in ("NO", "FALSE"):
        source.set("kernels", "plain", name)
    elif backend == "INDUCTOR":
        source.set("kernels", "compiled", name)
    else:
        source.leave(name, "blocks are compiled by inductor", "kernels=compiled")


def sequence_length(source: Conversion) -> None:
    """Convert the length of sequences that are divided; it counts only where they are."""
    name = f"{PARALLEL}.{PARALLEL}_sp_seq_length"
    if source.count(name):
        source.set("training.sequence_length", source.count(name), name)


def sequence_sharded_norms(source: Conversion) -> None:
    """Convert Megatron's sequence parallelism, which exists with tensor ranks only."""
    name = "megatron_lm_config.megatron_lm_sequence_parallelism"
    size = source.count("megatron_lm_config.megatron_lm_tp_degree")
    if source.is_on(name) and size > 1:
        source.set("parallelism.sequence_sharded_norms", True, name)
    else:
        source.ignore("there are no tensor ranks", name)
