"""One tiny model, trained in every way that a plan allows, compared with one process.

A combination is a choice on each axis: layout, ZeRO stage, offload, activation checkpointing,
precision, model. `scripts/parity.py` trains the whole product, `test_parity.py` a part of it.
"""

from __future__ import annotations

import atexit
import itertools
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rank_processes import Case, curve, tiny_config, train_cases

from trainctl.config.registry import changed_section, new_section
from trainctl.config.schema import (
    Accelerator,
    DataConfig,
    DataType,
    OffloadDevice,
    PipelineSchedule,
    RunConfig,
)
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

STEPS = 30
TOKENS = 128
"""Tokens per sample."""
CLIPPING = 0.5
CLIPPED_STEPS = 20
"""Least number of the 30 steps in which the gradient must be clipped."""

TOLERANCE = 1e-5
"""Limits in fp32: losses in nats, gradient norms relative to the norm."""
SPREADS = 5.0
"""Limits in bf16, as multiples of the difference between ZeRO 1 on two processes and ZeRO 0 on
one.
"""

Curve = dict[int, tuple[float, float]]

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "1": {},
    "DP2": {"data": 2},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "SP2": {"sequence": 2},
    "TP2xPP2xDP2": {"tensor": 2, "pipeline": 2, "data": 2},
    "TP4": {"tensor": 4},
    "FSDP2": {"data": 2},
    "HSDP4": {"data": 4},
    "CP2": {"context": 2},
    "CP4": {"context": 4},
    "SP2xCP2": {"sequence": 2, "context": 2},
    "TP2xCP2": {"tensor": 2, "context": 2},
    "PP2V": {"pipeline": 2},
    "TP2xPP2V": {"tensor": 2, "pipeline": 2},
}
"""Sizes of the mesh axes. "1" is the one process that all others are compared with. FSDP2 is the
engine of that name, HSDP4 the same in two shard groups of two. TP4 is more ranks than key-value
heads. V is DualPipeV.
"""
FOLDED = tuple(name for name in LAYOUTS if name.endswith("V"))
CONTEXT = tuple(name for name, sizes in LAYOUTS.items() if "context" in sizes)
OF_THEIR_OWN = ("TP4", "FSDP2", "HSDP4", *CONTEXT, *FOLDED)
"""Layouts that are not combined with everything."""

STAGES = ("0", "1", "2", "3")

OFFLOADS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "cpu": {"optimizer": OffloadDevice.cpu},
    "cpu-all": {"optimizer": OffloadDevice.cpu, "parameters": OffloadDevice.cpu},
    "ratio-0.5": {"optimizer": OffloadDevice.cpu, "ratio": 0.5},
    "nvme-optimizer": {"optimizer": OffloadDevice.nvme},
    "nvme": {"optimizer": OffloadDevice.nvme, "parameters": OffloadDevice.nvme},
}

CHECKPOINTING: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"mode": "full"},
    "every-2nd": {"mode": "full", "every_kth_block": 2},
    "selective": {"mode": "selective"},
    "offloaded": {"mode": "full", "offload_to_cpu": True},
    "partitioned": {"mode": "full", "partition_across_tensor_ranks": True},
}

PRECISIONS = ("fp32", "bf16")

FAMILIES = ("llama", "mistral", "qwen3", "gpt2")
MODELS = tuple(f"{family}{tied}" for family in FAMILIES for tied in ("", "-untied"))
ONE_HEAD = "llama-kv1"
"""Llama with one key-value head, which two tensor ranks share."""
MODULE = "module"
"""The module of `own_module`, which is not of transformers."""
DOCUMENTS = "documents"
"""Llama on short documents, several in each sample, that do not attend to each other."""

DEEP = "deep"
"""Prefix of a model with more blocks, whose steps are of four micro-batches: two stages on each of
two ranks need both.
"""

NO_EFFECT, NOT_YET = "TC099", "not yet"
_CHOSEN = ("parallelism.", "offload.", "activation_checkpointing.")

AXES: Mapping[str, tuple[str, ...]] = {
    "layout": tuple(name for name in LAYOUTS if name not in ("1", *OF_THEIR_OWN)),
    "stage": STAGES,
    "offload": tuple(OFFLOADS),
    "checkpointing": tuple(CHECKPOINTING),
    "precision": PRECISIONS,
    "model": (*MODELS, MODULE, DOCUMENTS),
}


@dataclass(frozen=True, order=True)
class Combination:
    """Choice on each axis, by name."""

    layout: str = "1"
    stage: str = "0"
    offload: str = "none"
    checkpointing: str = "none"
    precision: str = "fp32"
    model: str = "llama"
    large: bool = False
    """Use weights of a megabyte: DeepSpeed swaps nothing smaller to NVMe, so the tiny model's
    offload to NVMe would be untested.
    """

    @classmethod
    def of(cls, *choices: str) -> Combination:
        """Build a combination from one value of each axis of `AXES`, in their order."""
        chosen = dict(zip(AXES, choices, strict=True))
        return cls(**chosen, large=chosen["offload"].startswith("nvme"))

    def __str__(self) -> str:
        return " ".join(getattr(self, axis) for axis in AXES)

    @property
    def reference(self) -> Combination:
        """Return the same model and precision on one process, without ZeRO."""
        return Combination(precision=self.precision, model=self.model, large=self.large)

    @property
    def spread(self) -> Combination | None:
        """Return the bf16 combination whose distance from the reference measures the rounding
        error.
        """
        if self.precision == "fp32":
            return None
        return replace(self.reference, layout="DP2", stage="1")

    @property
    def world_size(self) -> int:
        return math.prod(LAYOUTS[self.layout].values())


@dataclass(frozen=True)
class Verdict:
    """Plan of a combination, or the reason of its refusal."""

    plan: RunPlan | None
    """Plan to train; None if it is refused."""
    refusal: tuple[Finding, ...] = ()
    """Errors, or settings without effect; empty if there is a plan."""


def judge(
    combination: Combination,
    *,
    steps: int = STEPS,
    tokens: int = TOKENS,
    data: DataConfig | None = None,
    nvme: Path = Path("/nvme"),
) -> Verdict:
    """Plan a combination.

    A setting without effect (such as partitioned activations without tensor parallelism) only gets
    a warning, but it makes the combination a duplicate of another one, so it is refused here.

    Args:
        data: Corpus; None for that of the tiny recipe.
        nvme: Folder that states are swapped to.
    """
    hardware = Hardware(
        name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=combination.world_size
    )
    config = layout_config(combination, steps, nvme, tokens)
    config.data = data or config.data
    resolution = resolve(config, hardware)
    if resolution.plan is None:
        return Verdict(None, tuple(item for item in resolution.findings if item.is_error))
    unready = tuple(Finding(rule=NOT_YET, message=text) for text in resolution.plan.not_yet)
    idle = tuple(
        item
        for item in resolution.findings
        if item.rule == NO_EFFECT and item.key.startswith(_CHOSEN)
    )
    return Verdict(None, unready or idle) if unready or idle else Verdict(resolution.plan)


def layout_config(
    combination: Combination, steps: int, nvme: Path, tokens: int = TOKENS
) -> RunConfig:
    """Return the configuration of the tiny model on the layout."""
    config = tiny_config(steps=steps, sequence_length=tokens)
    config.optimizer.gradient_clipping = CLIPPING
    config.optimizer.lr = 1e-3
    config.schedule.warmup_steps = 3
    config.checkpoint.at_end = False
    config.training.evaluation_samples = 0
    config.training.sample_tokens = 0
    name = combination.model.removeprefix(f"{DEEP}-")
    if name == MODULE:
        from module_cases import module_section  # imports torch

        config.model = module_section("full", ())
    else:
        family, _, variant = name.partition("-")
        if family == DOCUMENTS:
            family, config.data = "llama", replace(short_documents(), mask_documents=True)
        config.model.family = family
        config.model.tie_word_embeddings = variant != "untied"
        if combination.model == ONE_HEAD:
            config.model.num_key_value_heads = 1
        if config.model.family == "gpt2":
            config.model.num_key_value_heads = None
    if name != combination.model:
        config.training.gradient_accumulation_steps = 4
        config.model.num_layers = 4 if name == MODULE else 5  # the module has four of its own
    if combination.layout in FOLDED:
        config.parallelism.pipeline_schedule = PipelineSchedule.dualpipev
    if combination.layout in ("FSDP2", "HSDP4"):
        config.engine = new_section("engine", "fsdp2")
    if combination.layout == "HSDP4":
        config.zero_stage.shard_group_size = 2
    config.precision.compute = DataType(combination.precision)
    config.zero_stage.stage = int(combination.stage)
    for section, values in (
        ("parallelism", LAYOUTS[combination.layout]),
        ("offload", OFFLOADS[combination.offload]),
        ("activation_checkpointing", CHECKPOINTING[combination.checkpointing]),
    ):
        setattr(config, section, changed_section(getattr(config, section), **values))
    if combination.large:
        enlarge(config)
    if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
        config.offload.nvme_path = str(nvme)
    if config.offload.parameters is OffloadDevice.nvme:
        config.offload.buffer_size = 1_000_000
        config.offload.buffer_count = 32  # as many parameters as are in flight at once
        config.offload.max_in_cpu = 0
    return config


@cache
def short_documents() -> DataConfig:
    """Return a corpus of documents of about 20 tokens, in files that this process removes."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    files = [folder / "short.jsonl", folder / "held_out.jsonl"]
    for file in files:
        file.write_text("".join(f'{{"text": "{n} squared: {n * n}"}}\n' for n in range(4000)))
    texts, held_out = ([str(file)] for file in files)
    return new_section("data", "files", paths=texts, held_out_paths=held_out)


def enlarge(config: RunConfig) -> None:
    """Enlarge the weights to a megabyte: DeepSpeed swaps nothing smaller to NVMe."""
    model = config.model
    model.num_layers, model.hidden_size = 2, 256
    elements = 2048 if config.precision.compute == DataType.fp32 else 4096
    model.vocab_size = model.intermediate_size = elements  # matrices of 2 MiB
    config.training.sequence_length = min(config.training.sequence_length, 64)
    config.zero_stage.sub_group_size = 1_000_000
    config.zero_stage.max_live_parameters = 10_000_000


def train(
    combination: Combination,
    folder: Path,
    *,
    steps: int = STEPS,
    tokens: int = TOKENS,
    data: DataConfig | None = None,
) -> Curve:
    """Train a combination that is not refused; return loss and gradient norm by step.

    Raises:
        RanksFailed: A rank failed.
    """
    (trained,) = train_all([combination], folder, lambda _: (steps, tokens), data=data).values()
    return trained


def train_all(
    combinations: Iterable[Combination],
    folder: Path,
    size: Callable[[Combination], tuple[int, int]],
    *,
    data: DataConfig | None = None,
    together: bool = False,
) -> dict[Combination, Curve]:
    """Train several combinations, each on processes of its own or several on the same.

    Args:
        combinations: Combinations that are not refused.
        size: Steps, and tokens of a sample, of each.
        data: Corpus; None for that of the tiny recipe.
        together: Share processes between combinations of one world size, except those with offload.

    Raises:
        RanksFailed: A rank failed.
    """
    cases: dict[Combination, Case] = {}
    shared: dict[tuple[int, bool], list[Case]] = {}
    for combination in dict.fromkeys(combinations):
        steps, tokens = size(combination)
        verdict = judge(combination, steps=steps, tokens=tokens, data=data, nvme=folder / "nvme")
        assert verdict.plan is not None, verdict.refusal
        case = Case(verdict.plan, RunPaths(Path(tempfile.mkdtemp(dir=folder))))
        cases[combination] = case
        is_apart = not together or combination.offload != "none"
        shared.setdefault((combination.world_size, is_apart), []).append(case)
    for (ranks, is_apart), some in shared.items():
        train_cases(ranks, some, together=not is_apart)
    curves = {combination: curve(case.run) for combination, case in cases.items()}
    for combination, trained in curves.items():
        assert list(trained) == list(range(1, size(combination)[0] + 1))
    return curves


@dataclass(frozen=True)
class Difference:
    """Largest difference of two curves at any step; infinite if a value is not a number."""

    loss: float
    """Difference of losses in nats."""
    norm: float
    """Difference of gradient norms, relative to the reference's."""

    @classmethod
    def between(cls, reference: Curve, other: Curve) -> Difference:
        losses = [abs(other[step][0] - loss) for step, (loss, _) in reference.items()]
        norms = [abs(other[step][1] - norm) / norm for step, (_, norm) in reference.items()]
        return cls(_largest(losses), _largest(norms))

    def within(self, limit: Difference) -> bool:
        """Return True if neither difference exceeds its limit."""
        return self.loss <= limit.loss and self.norm <= limit.norm


def _largest(values: list[float]) -> float:
    return max(values) if all(map(math.isfinite, values)) else math.inf


def limit(spread: Difference | None) -> Difference:
    """Return the allowed difference of a combination from its reference.

    Args:
        spread: In bf16, the measured difference of the combination's `spread`.
    """
    if spread is None:
        return Difference(TOLERANCE, TOLERANCE)
    return Difference(SPREADS * spread.loss, SPREADS * spread.norm)


def clips_enough(reference: Curve, clipping: float = CLIPPING) -> bool:
    """Return True if enough steps are clipped for wrong clipping to show."""
    clipped = sum(norm > clipping for _, norm in reference.values())
    return clipped * STEPS >= CLIPPED_STEPS * len(reference)


def product(**chosen: Sequence[str]) -> list[Combination]:
    """Return all combinations, with some axes fixed to the given values."""
    return [
        Combination.of(*values)
        for values in itertools.product(*(chosen.get(axis, AXES[axis]) for axis in AXES))
    ]


Pair = frozenset[tuple[str, str]]


def pairs(combination: Combination) -> set[Pair]:
    """Return the combination's choices on any two axes."""
    chosen = [(axis, getattr(combination, axis)) for axis in AXES]
    return {frozenset(pair) for pair in itertools.combinations(chosen, 2)}


def pairwise(
    candidates: Iterable[Combination], *, covered: Iterable[Combination] = (), seed: int = 0
) -> list[Combination]:
    """Choose few candidates that together cover every pair of choices of any candidate.

    The choice is greedy: the candidate with the most new pairs; among equals the one with the
    fewest processes, then fp32, which is faster, then the first of a shuffled order.

    Args:
        covered: Combinations whose pairs are already covered.
    """
    rest = list(candidates)
    random.Random(seed).shuffle(rest)
    rest.sort(key=lambda combination: (combination.world_size, combination.precision != "fp32"))
    had: set[Pair] = set().union(*map(pairs, covered))
    new = {combination: pairs(combination) - had for combination in rest}
    chosen = []
    while any(new.values()):
        best = max(new, key=lambda combination: len(new[combination]))
        chosen.append(best)
        had = new[best]
        new = {combination: uncovered - had for combination, uncovered in new.items()}
    return chosen
