"""Cases to measure on a machine with a GPU, the most informative first.

Speed is compared with other training loops, memory with the budget. The cases of memory cover every
option that computes differently on a GPU and on a CPU: `tests/test_gpu_check.py` compares the list
with the option groups, and each case with the plan for its device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

TRAINCTL = "trainctl"
CEILINGS = "ceilings"

ALWAYS = (
    "hardware.devices_per_node=1",
    "model.weights=random",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
    "checkpoint.at_end=false",
)
ON_CPU = ("hardware=cpu", "precision=fp32")  # many CPUs emulate bf16 products, one number at a time
PAIRS = 200
"""Number of pairs in the preference data."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Numbers of steps of a case: some to warm up, some that are timed, some that are profiled."""

    warm: int = 5
    timed: int = 8
    profiled: int = 2

    @property
    def total(self) -> int:
        """All steps; the profiler needs one more before those that it records."""
        return self.warm + self.timed + (1 + self.profiled if self.profiled else 0)

    @property
    def window(self) -> tuple[int, int]:
        """First and last profiled step, counted from 1."""
        return self.total - self.profiled + 1, self.total


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration, trained by one loop in a process of its own."""

    name: str
    loop: str = TRAINCTL
    """trainctl, a loop of `benchmarks.peers`, or the ceilings of the device."""
    model: tuple[str, ...] = ("model=qwen3-0.6b",)
    """Overrides for the model; on a CPU they give way to a tiny one."""
    length: int = 2048
    """Tokens per sample; 64 on a CPU."""
    micro_batch: int = 4
    """Micro-batch size; 2 on a CPU."""
    options: tuple[str, ...] = ()
    steps: Steps = Steps()
    limit: float = 75.0
    """Most seconds that it may take."""
    device: str = "h100-80g"
    """Option of `hardware` with the smallest device that the case fits."""

    @property
    def words(self) -> list[str]:
        """Overrides that distinguish the case from the others of its call."""
        if self.loop == CEILINGS:
            return []
        return [
            *self.model,
            f"training.sequence_length={self.length}",
            f"training.micro_batch_size={self.micro_batch}",
            *self.options,
        ]

    @property
    def shape(self) -> str:
        """Letter of the shape that cases of speed share."""
        return self.name.split()[0]


PLAIN = ("kernels.liger=false", "kernels.cross_entropy=plain", "kernels.compile=none")
ZERO1, ZERO3 = ("zero_stage=1",), ("zero_stage=3",)
MASKED = (*ZERO1, "kernels=compiled", "data.mask_documents=true")

SPEED_LOOPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ZeRO 1", TRAINCTL, (*ZERO1, *PLAIN)),
    ("torchtitan's way", "torchtitan", ZERO1),
    ("ZeRO 1, liger", TRAINCTL, (*ZERO1, "kernels=liger")),
    ("ZeRO 1, compiled", TRAINCTL, (*ZERO1, "kernels=compiled")),
    ("bare ZeRO 1, compiled", "bare-compiled", ZERO1),
    ("ZeRO 3", TRAINCTL, (*ZERO3, *PLAIN)),
    ("bare ZeRO 3 by blocks", "bare-leaf-blocks", ZERO3),
    ("bare ZeRO 3", "bare", ZERO3),
    ("masked", TRAINCTL, MASKED),
    ("bare masked, variable length", "bare-varlen", ZERO1),
    ("bare masked, sdpa", "bare-masked", ZERO1),
    # trainctl's FSDP2 takes no other kernels yet (TC405).
    ("fsdp2", TRAINCTL, ("engine=fsdp2", *ZERO3, *PLAIN)),
    ("transformers' Trainer", "transformers", ZERO1),
    ("ZeRO 0", TRAINCTL, ("zero_stage=0", *PLAIN)),
)
"""Loops in the order of their worth: name, loop, options."""

SHAPES = {
    "A": Case(name="A"),
    "B": Case(name="B", model=("model=llama-8b", "model.num_layers=4"), length=4096, micro_batch=2),
}
"""A is a small model whose kernels are short, B has the width of a large one."""


def _speed_cases() -> tuple[Case, ...]:
    return tuple(
        replace(base, name=f"{shape} {name}", loop=loop, options=options)
        for name, loop, options in SPEED_LOOPS
        for shape, base in SHAPES.items()
        if shape == "B" or "masked" not in name
    )


SPEED = (Case(name=CEILINGS, loop=CEILINGS), *_speed_cases())

FULL = "activation_checkpointing=full"


def _memory(name: str, *options: str, model: str = "qwen3-0.6b", **size: int) -> Case:
    return Case(
        name=name,
        model=(f"model={model}",),
        options=("training.gradient_accumulation_steps=2", *options),
        steps=Steps(warm=2, timed=4, profiled=0),
        limit=300.0,
        **size,  # type: ignore[arg-type]
    )


MEMORY = (
    # ZeRO stages and kept states.
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
    replace(
        _memory(
            "8b-low-memory-8k",
            "zero_stage=1",
            FULL,
            "precision=bf16-low-memory",
            "kernels=chunked-loss",
            model="llama-8b",
            length=8192,
            micro_batch=1,
        ),
        device="h200-141g",
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


def overrides(case: Case, *, folder: Path, on_gpu: bool) -> list[str]:
    """Return trainctl's overrides for a case; without a GPU everything is made small.

    Args:
        folder: Folder of the input files and the swapped states.
    """
    if not on_gpu:
        left_out = ("precision=", "kernels=liger")
        options = tuple(each for each in case.options if not each.startswith(left_out))
        tiny = ("model=tiny-llama",)
        case = replace(case, model=tiny, length=64, micro_batch=2, options=options)
    first, last = case.steps.window
    return [
        *(() if on_gpu else ON_CPU),
        f"training.steps={case.steps.total}",
        *ALWAYS,
        *((f"logging.profile_steps=[{first},{last}]",) if case.steps.profiled else ()),
        *(() if "data=preferences" in case.options else ("data.max_bytes=1000000",)),
        *(word.format(folder=folder) for word in case.words),
    ]


def write_pairs(path: Path) -> None:
    """Write preference data: questions, each with a right and a wrong answer."""
    lines = [
        {"prompt": f"{n} + {n} = ", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"}
        for n in range(PAIRS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
