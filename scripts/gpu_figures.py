"""Figures to measure on a machine with a GPU, the most informative first.

Speed is compared with other training loops, memory with the budget. Together the figures cover
every option that computes differently on a GPU and on a CPU: `tests/test_gpu_check.py` compares the
list with the option groups, and each figure with the plan for its device.
"""

from __future__ import annotations

from dataclasses import dataclass

PEERS = ("bare", "transformers", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One configuration to launch."""

    name: str
    model: str = "qwen3-0.6b"
    """Option of `model`; replaced by a tiny model on a CPU."""
    length: int = 2048
    """Tokens per sample; 64 on a CPU."""
    device: str = "h100-80g"
    """Option of `hardware` with the smallest device that the figure fits."""
    micro_batch: int = 4
    """Micro-batch size; at most 2 on a CPU."""
    options: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    """Other loops that train the same configuration."""
    steps: int = 6
    warmup: int = 2
    """Steps at the start that are not timed."""
    repeats: int = 1
    """Number of runs of every loop; the median counts."""

    @property
    def is_of_speed(self) -> bool:
        """Return True if other loops train the same for enough steps to compare speeds."""
        return bool(self.peers)


def _speed(name: str, *options: str, peers: tuple[str, ...] = PEERS, **size: object) -> Figure:
    return Figure(name=name, options=options, peers=peers, steps=16, warmup=6, repeats=2, **size)  # type: ignore[arg-type]


def _memory(name: str, *options: str, **size: object) -> Figure:
    return Figure(name=name, options=options, **size)  # type: ignore[arg-type]


FULL = "activation_checkpointing=full"

FIGURES = (
    _speed("1b", "zero_stage=1", FULL, model="llama-1b"),
    _speed("3b-8k", "zero_stage=1", FULL, model="llama-3b", length=8192, micro_batch=1),
    _speed(
        "8b-8k",
        "zero_stage=1",
        FULL,
        "precision=bf16-low-memory",
        "kernels=chunked-loss",
        model="llama-8b",
        device="h200-141g",
        length=8192,
        micro_batch=1,
        peers=("bare", "transformers"),  # the other loops cannot update bf16 weights
    ),
    # Memory: ZeRO stages and kept states.
    _memory("0.6b-zero0", "zero_stage=0"),
    _memory("0.6b-zero2-full", "zero_stage=2", FULL, micro_batch=8),
    _memory("0.6b-zero3-selective", "zero_stage=3", "activation_checkpointing=selective"),
    _memory("1b-zero1", "zero_stage=1", model="llama-1b", micro_batch=2),
    _memory("3b-full", "zero_stage=2", FULL, model="llama-3b", micro_batch=2),
    _memory("8b-lora", "zero_stage=0", FULL, "adapter=lora", model="llama-8b", micro_batch=2),
    _memory(
        "8b-qlora",
        "zero_stage=0",
        FULL,
        "adapter=lora",
        "adapter.base_weights=nf4_double",
        model="llama-8b",
        micro_batch=2,
    ),
    _memory("0.6b-offload", "zero_stage=2", FULL, "offload=cpu"),
    # Long sequences and kernels.
    _memory("0.6b-liger-8k", "zero_stage=1", FULL, "kernels=liger", length=8192, micro_batch=1),
    _memory("0.6b-chunked-16k", FULL, "kernels=chunked-loss", length=16384, micro_batch=1),
    _memory(
        "1b-tiles-64k",
        "kernels=long-context",
        "activation_checkpointing=offloaded",
        model="llama-1b",
        length=65536,
        micro_batch=1,
    ),
    _memory("0.6b-compiled", "kernels=compiled"),
    _memory("0.6b-deepcompile", "zero_stage=3", "kernels=deepcompile"),
    # Precisions and optimizers.
    _memory("0.6b-fp8", "precision=fp8"),
    _memory("0.6b-fp16", "precision=fp16"),
    _memory("0.6b-fp32", "precision=fp32", micro_batch=2),
    _memory("0.6b-autocast", "precision=autocast-bf16"),
    _memory("0.6b-low-memory", "precision=bf16-low-memory"),
    _memory("0.6b-8bit", "optimizer=adamw_8bit", "zero_stage=0"),
    _memory("0.6b-muon", "optimizer=muon"),
    _memory("0.6b-lion", "optimizer=lion"),
    _memory("0.6b-adafactor", "optimizer=adafactor", "zero_stage=0"),
    _memory("124m-lamb", "optimizer=lamb", "zero_stage=0", model="gpt2-124m", length=1024),
    # NVMe swapping, and the other engine.
    _memory("0.6b-offload-part", "zero_stage=3", FULL, "offload=cpu-partial"),
    _memory("0.6b-offload-all", "zero_stage=3", FULL, "offload=cpu-all"),
    _memory("0.6b-nvme", "zero_stage=3", FULL, "offload=nvme", "offload.nvme_path={folder}"),
    _memory("0.6b-fsdp2", "engine=fsdp2", "zero_stage=3", FULL),
    _memory(
        "0.6b-dpo-lora",
        "zero_stage=0",
        FULL,
        "adapter=dora",
        "objective=dpo",
        "data=preferences",
        "data.paths=[{folder}/pairs.jsonl]",
        length=512,
    ),
)
