"""Megatron-LM in the budget's terms: differences of its last pipeline rank from DeepSpeed's.

Rows name a functional test of Megatron-LM and give its sizes; `tests/data/megatron_cases.csv` has
the other settings of that test. Paths are those of NVIDIA/Megatron-LM, under `megatron/core`.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from memory_devices import workspace_of
from memory_rows import NotExpressible, Recompute, Row
from memory_settings import (
    context_of,
    is_pure,
    offload_of,
    offloads_activations,
    precision_words,
    recompute_of,
)

from trainctl.config.schema import OffloadDevice
from trainctl.memory.rank import Components

FACTS = Path(__file__).parents[2] / "tests" / "data" / "megatron_cases.csv"
MIB = 2**20
CUBLAS_WORKSPACE = 2 * 32 * MIB
"""`CUBLAS_WORKSPACE_CONFIG=:4096:8`, 8 buffers of 4096 KiB, for the thread of the forward pass and
for autograd's. Most tests set it; others have torch's own choice."""
ENGINE_WORKSPACE = {"h100": 32 * MIB, "gb200": 32 * MIB, "b200": 32 * MIB}
"""Transformer Engine's own workspace for cuBLAS, by device; 4 MiB on others (its
pytorch/module/base.py)."""
REMAINDER = 3 * MIB
"""Bytes that four runs allocate beyond the other terms: batches, optimizer's lists, random
states.
"""
LOGIT_BYTES = 6
"""Logits in 16 bits and their softmax in fp32; the backward pass writes the gradient over the
softmax, then casts it (tensor_parallel/cross_entropy.py).
"""
FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A Megatron-LM job; attributes are the names of its options, in Python's spelling.

    `attention` is flash, fused, unfused or local; `recompute` is none, core (of attention) or full;
    `chunk_layers` is the number of blocks of a model chunk (the whole stage without interleaving).
    Accumulated gradients take `gradient_bytes` an element.
    """

    hidden: int
    heads: int
    query_groups: int
    ffn: int
    layers: int
    vocab: int
    sequence: int
    micro_batch: int
    tensor: int
    pipeline: int
    data: int
    context: int
    distributed_optimizer: bool
    untied: bool
    sequence_parallel: bool
    activation: str
    norm: str
    query_key_norm: bool
    attention: str
    attention_dropout: bool
    hidden_dropout: bool
    bias: bool
    learned_positions: bool
    stage_layers: int
    chunk_layers: int
    recompute: str
    device: str
    gradient_bytes: int
    cublas_workspace: int

    @property
    def width(self) -> int:
        return self.hidden // self.heads

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 if self.norm == "rms" else 2)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence // self.context


def job_of(row: Row) -> Job:
    """Return the Megatron-LM job of a row.

    Raises:
        NotExpressible: The job has experts, or another part without a term in the budget.
    """
    facts = _facts().get(row["model"], {}) or _facts().get(
        row["source_path"].split("/")[-2:-1][0] if "/" in row["source_path"] else "", {}
    )
    _check(row, facts)
    text = row.words("model", "id", "caveat")
    hidden, heads = row.size("hidden"), row.size("heads")
    tensor, pipeline = max(1, row.number("tp", 1)), max(1, row.number("pp", 1))
    layers = row.size("layers")
    vocab = row.number("vocab", 50257)
    multiple = 128 * tensor
    slots = (
        layers + int(facts.get("embedding_as_layer") or 0) + int(facts.get("loss_as_layer") or 0)
    )
    stage_layers = slots // pipeline - int(facts.get("loss_as_layer") or 0)
    if facts.get("last_stage_layers"):
        stage_layers = int(facts["last_stage_layers"])
    chunk = int(facts.get("layers_per_virtual_stage") or 0) or stage_layers
    chunk = chunk if chunk < stage_layers else stage_layers
    device = next(
        (name for name in ("gb200", "b200", "h100", "a100") if name in row.words("gpu")), "a100"
    )
    attention = facts.get("attention") or (
        "unfused" if re.search(r"unfused|eager|naive", row.words("attention")) else "auto"
    )
    if attention == "auto":
        # Transformer Engine prefers cuDNN's attention on Hopper and later, flash-attn's before.
        attention = "flash" if device == "a100" else "fused"
    # A test uses Megatron's defaults for unset options; a named model has its own defaults.
    own = {} if facts or not LIKE_LLAMA.search(row.words("model", "id")) else LLAMA
    activation = (
        facts.get("activation")
        or own.get("activation")
        or ("swiglu" if "swiglu" in text else "gelu")
    )
    ffn = row.number("ffn", 0) or (
        4 * hidden if activation != "swiglu" else int(4 * hidden * 2 / 3) // 64 * 64
    )
    return Job(
        hidden=hidden,
        heads=heads,
        query_groups=row.number("kv_heads", heads) or heads,
        ffn=ffn,
        layers=layers,
        vocab=-(-vocab // multiple) * multiple,
        sequence=row.size("seq_len"),
        micro_batch=row.size("micro_batch", 1),
        tensor=tensor,
        pipeline=pipeline,
        data=max(1, row.number("dp", 1)),
        context=context_of(row),
        distributed_optimizer=bool(
            re.search(r"distributed|zero[- ]?1", row.words("sharding", "optimizer"))
        ),
        untied=facts.get("untied", own.get("untied", "1" if "untie" in text else "0")) == "1",
        sequence_parallel=facts.get("sequence_parallel", str(int(_splits_sequence(row)))) == "1",
        activation=activation,
        norm=facts.get("norm") or own.get("norm") or ("rms" if "rmsnorm" in text else "layer"),
        query_key_norm=facts.get("query_key_norm") == "1",
        attention=attention,
        attention_dropout=float(facts.get("attention_dropout") or own.get("dropout", 0.1)) > 0,
        hidden_dropout=float(facts.get("hidden_dropout") or own.get("dropout", 0.1)) > 0,
        bias=facts.get("bias", own.get("bias", "1")) == "1",
        learned_positions=(
            facts.get("positions")
            or own.get("positions")
            or ("rope" if "rope_" in text else "learned")
        )
        == "learned",
        stage_layers=stage_layers,
        chunk_layers=chunk,
        recompute=facts.get("recompute") or RECOMPUTE[recompute_of(row)[0]],
        device=device,
        # By default only bf16 gradients are accumulated in fp32, not fp16 ones (arguments.py).
        cublas_workspace=(
            CUBLAS_WORKSPACE if facts.get("cublas_config") == "1" else workspace_of(row)
        ),
        gradient_bytes=2 if re.match(r"fp16(?!.*(fp32|main))", precision_words(row)) else FP32,
    )


LIKE_LLAMA = re.compile(r"llama|mistral|qwen|gemma|swiglu")
LLAMA = {
    "activation": "swiglu",
    "norm": "rms",
    "bias": "0",
    "dropout": "0.0",
    "positions": "rope",
    "untied": "1",
}
"""Options that make Megatron-LM's model a Llama."""


def _splits_sequence(row: Row) -> bool:
    """Return True if tensor-parallel ranks split what each would replicate
    (--sequence-parallel).
    """
    text = row.words("model", "id", "caveat", "sharding", "cp_sp")
    return bool(re.search(r"sequence[-_ ]parallel|\bsp\b(?!\s*\d)", text)) and "ulysses" not in text


RECOMPUTE = {
    Recompute.none: "none",
    Recompute.attention: "core",
    Recompute.operations: "core",
    Recompute.full: "full",
}


def _check(row: Row, facts: dict[str, str]) -> None:
    """Refuse jobs that the budget cannot express.

    Raises:
        NotExpressible: The job has a part without a term.
    """
    if facts.get("unsupported"):
        raise NotExpressible(f"{facts['unsupported']}: no term for it")
    if facts.get("fsdp") or "fsdp" in row.words("sharding"):
        raise NotExpressible("Megatron's FSDP: no term for its buffers")
    if row.number("pp", 1) > 1 and "last rank" not in row.words("metric"):
        raise NotExpressible("which pipeline rank was looked at: the last one alone has terms")
    if re.search(r"zero[- ]?[23]|hsdp", row.words("sharding")):
        raise NotExpressible(f"sharding '{row['sharding']}' in Megatron-LM")
    precision = precision_words(row).strip() or "bf16"
    if facts.get("fp8") == "1" or "fp8" in precision:
        raise NotExpressible("Transformer Engine's fp8: no term for its copies of weights")
    if is_pure(row) or not re.search(r"bf16|fp16|mixed", precision):
        raise NotExpressible(f"precision '{row['precision']}' in Megatron-LM: no term for it")
    optimizer = row.words("optimizer")
    if optimizer and ("adam" not in optimizer or re.search(r"8-?bit|cpu", optimizer)):
        raise NotExpressible(f"optimizer '{row['optimizer']}' in Megatron-LM: no term for it")
    if offloads_activations(row) or OffloadDevice.none != offload_of(row)[0]:
        raise NotExpressible("offloading in Megatron-LM: no term for it")
    if recompute_of(row)[1] > 1 or re.search(r"mlp|norm|moe|mla", row.words("ac_mode")):
        raise NotExpressible(f"ac_mode '{row['ac_mode']}' in Megatron-LM: no term for it")


@cache
def _facts() -> dict[str, dict[str, str]]:
    with FACTS.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("#")]
    return {record["case"]: record for record in csv.DictReader(lines)}


def parameters(job: Job) -> int:
    """Return the number of parameters of the last pipeline rank."""
    queries, keys = job.heads * job.width, job.query_groups * job.width
    up = 2 if job.activation == "swiglu" else 1
    qkv, fc1 = queries + 2 * keys, up * job.ffn
    block = (job.hidden * (qkv + queries) + job.hidden * (fc1 + job.ffn)) // job.tensor
    block += 2 * job.norm_parameters
    if job.bias:
        block += (qkv + fc1) // job.tensor + 2 * job.hidden
    if job.query_key_norm:
        block += 2 * job.width * (1 if job.norm == "rms" else 2)
    table = job.vocab // job.tensor * job.hidden
    tables = 2 if job.pipeline == 1 and job.untied else 1
    positions = job.sequence * job.hidden if job.pipeline == 1 and job.learned_positions else 0
    return block * job.stage_layers + job.norm_parameters + tables * table + positions


def block_bytes(job: Job) -> float:
    """Return the bytes per token that one block keeps (arXiv:2205.05198, section 4, operation by
    operation).
    """
    queries = job.heads * job.width / job.tensor
    keys = job.query_groups * job.width / job.tensor
    heads = job.heads / job.tensor
    whole = job.tensor if job.sequence_parallel else 1
    statistics = 4 if job.norm == "rms" else 8
    mask = 1 if job.hidden_dropout else 0
    norms = 2 * ((4 + mask) * job.hidden + statistics) / whole
    attention = 2 * (queries + 2 * keys) + 2 * queries
    if job.query_key_norm:
        attention += 2 * (queries + keys)
    if job.attention in ("unfused", "local") and job.recompute != "core":
        attention += (5 if job.attention_dropout else 2) * heads * job.sequence / job.context
    else:
        # flash-attn's layout differs from Megatron's, so its output is copied.
        attention += FP32 * heads + (2 * queries if job.attention == "flash" else 0)
    copies = 3 if job.activation == "swiglu" else 2
    return norms + attention + 2 * copies * job.ffn / job.tensor


def blocks_alive(job: Job) -> int:
    """Return the number of blocks whose activations are alive at once on the last rank.

    One micro-batch, or (chunks - 1) * stages + 1 with interleaved chunks
    (pipeline_parallel/schedules.py).
    """
    chunks = job.stage_layers // job.chunk_layers
    return job.chunk_layers * ((chunks - 1) * job.pipeline + 1)


def held_inputs(job: Job) -> int:
    """Return the bytes that a rank after the first holds between steps.

    Each chunk keeps the input of its last micro-batch until the next one arrives
    (`set_input_tensor` in transformer/transformer_block.py), and the input's gradient
    (`retain_grad` in pipeline_parallel/schedules.py).
    """
    if job.pipeline == 1:
        return 0
    whole = job.tensor if job.sequence_parallel else 1
    boundary = 2 * job.tokens * job.hidden // whole
    return 2 * boundary * (job.stage_layers // job.chunk_layers)


def moments(job: Job) -> tuple[dict[str, Components], Components]:
    """Return memory by phase of the last pipeline rank, and memory after a step."""
    count = parameters(job)
    shard = -(-count // (job.data * job.context)) if job.distributed_optimizer else count
    workspace = REMAINDER + job.cublas_workspace
    if job.attention != "local":  # `--transformer-impl local` does not use Transformer Engine
        workspace += ENGINE_WORKSPACE.get(job.device, 4 * MIB)
    scores = 2 * job.heads // job.tensor * job.micro_batch * job.sequence**2
    base = Components(
        parameters=2 * count,
        gradients=job.gradient_bytes * count,
        master_weights=FP32 * shard,
        optimizer_states=2 * FP32 * shard,
        communication_buffers=workspace + (scores if job.attention == "local" else 0),
    )
    whole = job.tensor if job.sequence_parallel else 1
    block, tokens, alive = block_bytes(job), job.tokens, blocks_alive(job)
    boundary = 2 * job.hidden / whole
    kept = boundary if job.recompute == "full" else block
    mask = job.micro_batch * job.sequence**2 // job.context
    embedding = job.hidden / whole if job.pipeline == 1 and job.hidden_dropout else 0
    inside = int(tokens * (alive * kept + embedding)) + mask
    head = int(tokens * 4 * job.hidden / whole)
    if job.sequence_parallel and job.tensor > 1:
        head += 2 * tokens * job.hidden
    logits = LOGIT_BYTES * tokens * job.vocab // job.tensor
    table = 2 * job.vocab // job.tensor * job.hidden
    backward = int(tokens * (4 * job.ffn / job.tensor + 4 * job.hidden))
    again = int(tokens * block) if job.recompute == "full" else 0
    return {
        "backward_start": max(
            base.plus(activations=inside + head, logits=logits),
            base.plus(activations=inside + again + backward),
            # 2 bytes per logit: the gradient that enters the output projection.
            base.plus(activations=inside + head, logits=logits // 3, gradients=table),
            key=lambda moment: moment.total,
        ),
    }, base.plus(activations=held_inputs(job))
