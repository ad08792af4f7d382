"""Trainings that other tools begin and trainctl continues, for the matrix of docs/coming-from.md.

The list costs nothing to import; what trains is imported by the functions that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

BACK = "back there"
"""Column of the tool's own training, continued from what trainctl exports."""

LAYOUTS = ("1 process", "ZeRO 1", "ZeRO 2", "ZeRO 3", "tensor 2", "pipeline 2", "FSDP2")
"""Layouts of trainctl by name, keys of `deepspeed_cases.TARGETS`; two processes but in the first.
"""


@dataclass(frozen=True)
class Source:
    """A training of another tool, which saves a checkpoint."""

    tool: str
    saved: str
    """Layout that the tool trains on, or the form of the checkpoint."""
    processes: int


DEEPSPEED = {
    Source("DeepSpeed", f"ZeRO {stage}", processes): stage
    for stage, processes in product((0, 1, 2, 3), (2, 4))
}
"""ZeRO stage of each training with plain DeepSpeed."""

TOOLS = {
    Source("Trainer", "DDP", 2): "trainer",
    Source("Trainer, DeepSpeed", "ZeRO 1", 2): "zero1",
    Source("Trainer, DeepSpeed", "ZeRO 2", 2): "zero2",
    Source("Trainer, DeepSpeed", "ZeRO 3", 2): "zero3",
    Source("torch", "FSDP2, DCP", 2): "fsdp2",
    Source("torch", "FSDP2, DCP, flattened", 2): "fsdp2-flat",
}
"""Name of each training in `foreign_journeys`."""

MEGATRON = {
    Source("Megatron-core", "Llama, tensor 2", 2): "llama",
    Source("Megatron-core", "Qwen 3, DDP", 2): "qwen3",
    Source("Megatron-core", "GPT-2, distributed optimizer", 2): "gpt2",
}
"""Model of each training in `megatron_cases`."""

_GOES_BACK = ("trainer", "fsdp2", "fsdp2-flat")

Case = tuple[Source, str]
"""A source, and a layout or `BACK`."""

CASES: tuple[Case, ...] = (
    *product(DEEPSPEED, (*LAYOUTS, BACK)),
    *product(TOOLS, LAYOUTS),
    *((source, BACK) for source, tool in TOOLS.items() if tool in _GOES_BACK),
    *product(MEGATRON, LAYOUTS),
)


def largest_differences(folder: Path) -> Iterator[tuple[Case, float]]:
    """Train all cases; yield the largest difference of each one's losses, in nats."""
    yield from _deepspeed(folder)
    yield from _tools(folder)
    yield from _megatron(folder)


def _deepspeed(folder: Path) -> Iterator[tuple[Case, float]]:
    from deepspeed_cases import Journey, differences

    for source, stage in DEEPSPEED.items():
        journeys = [
            Journey(stage, source.processes, target, back=1 + stage % 3) for target in LAYOUTS
        ]
        found = differences(folder / f"{stage}-{source.processes}", journeys)
        yield from (((source, each.target), found[each].imported) for each in journeys)
        yield (source, BACK), max(found[each].returned for each in journeys)


def _tools(folder: Path) -> Iterator[tuple[Case, float]]:
    from foreign_journeys import (
        Layout,
        continue_in_tools,
        continue_in_trainctl,
        train_in_tools,
    )

    sources = {tool: source for source, tool in TOOLS.items()}
    expected = train_in_tools(folder, list(sources))
    layouts = [
        Layout(processes=1),
        *map(Layout, (1, 2, 3)),
        Layout(1, tensor=2),
        Layout(1, pipeline=2),
        Layout(3, engine="fsdp2"),
    ]
    for layout in layouts:
        found = continue_in_trainctl(
            folder, expected, dict.fromkeys(expected, layout), name=layout.name
        )
        yield from (((sources[tool], layout.name), worst) for tool, worst in found.items())
    continue_in_trainctl(folder, expected)
    returned = continue_in_tools(folder, {tool: expected[tool] for tool in _GOES_BACK})
    yield from (((sources[tool], BACK), worst) for tool, worst in returned.items())


def _megatron(folder: Path) -> Iterator[tuple[Case, float]]:
    from deepspeed_cases import TARGETS
    from megatron_cases import continue_here, train_there

    trained = train_there(folder)
    listed = list(product(MEGATRON.items(), LAYOUTS))
    layouts = [(model, *TARGETS[target]) for (_, model), target in listed]
    found = continue_here(folder, trained, layouts)
    for ((source, _), target), continued in zip(listed, found, strict=True):
        yield (source, target), continued.difference
