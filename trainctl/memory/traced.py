"""Memory of models besides the closed form: traced ones, and the teacher of a distillation.

A traced model's anatomy and activations are from its own code. A teacher takes its pass, and disk
for the store that it leaves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.registry import load_spec
from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.memory.activations import (
    BlockActivations,
    block_activations,
    compute_bytes,
    tokens_per_rank,
)
from trainctl.memory.constants import BYTES, GIB
from trainctl.memory.rank import Components, chunk_logit_bytes
from trainctl.memory.stages import tensor_parts
from trainctl.models.anatomy import Anatomy, parse_anatomy
from trainctl.models.local_path import local_path
from trainctl.models.tensors import stored_tensors
from trainctl.models.tracing import known_trace, trace_in_child
from trainctl.options.objective.distill import DistillConfig, row_bytes
from trainctl.plans.settings import number_formats
from trainctl.plans.shapes import count_parameters
from trainctl.plans.types import LayoutPlan, RunPlan

FEED_FORWARD = ("mlp", "ffn", "feed_forward", "moe", "intermediate", "output")
ATTENTION = ("attn", "attention")
"""Substrings of the names that architectures give to the children of a block."""


def block_part(name: str) -> str:
    """Return the field of `BlockActivations` that a child of a block counts to, by its name."""
    if "norm" in name:  # post_attention_layernorm contains "attention" too
        return "norms"
    if any(word in name for word in ATTENTION):
        return "attention"
    return "feed_forward" if any(word in name for word in FEED_FORWARD) else "norms"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """Result of a trace (`trainctl.train.models.trace`), on one rank without sharding."""

    anatomy: Anatomy
    block: BlockActivations
    """Activations of one block in bytes per token: the mean over the blocks."""

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain JSON, for another process."""
        return {"anatomy": self.anatomy.to_table(), "block": asdict(self.block)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TracedModel:
        """Build the trace from the result of `to_json`."""
        return cls(
            anatomy=parse_anatomy(content["anatomy"]), block=BlockActivations(**content["block"])
        )


def block_on_tensor_rank(traced: TracedModel, tensor: int) -> BlockActivations:
    """Return a traced block without a closed form on one of `tensor` tensor-parallel ranks.

    The activations of a part shrink with its weights, some of which the ranks may hold whole:
    latent attention, routers. Activations between the parts do not shrink, nor do the outputs of
    the block's two last products, which have full width.
    """
    block = traced.block

    def shared(part: str) -> int:
        kept: int = getattr(block, part)
        return round(kept * _weight_fraction(traced.anatomy, part, tensor))

    attention, feed_forward = shared("attention"), shared("feed_forward")
    ends = min(block.products, 2 * block.boundary)
    whole = block.attention + block.feed_forward
    inside = (attention + feed_forward) / whole if whole else 1.0
    return replace(
        block,
        attention=attention,
        feed_forward=feed_forward,
        products=ends + round((block.products - ends) * inside),
        # The same composition of parts as in `trainctl.train.models.trace`.
        feed_forward_gradient=block.feed_forward_gradient
        - block.feed_forward // 2
        + feed_forward // 2,
        attention_gradient=block.attention_gradient - block.attention + attention,
    )


def _weight_fraction(anatomy: Anatomy, part: str, tensor: int) -> float:
    """Return the fraction of a part's weights, over all blocks, that one tensor rank holds."""
    numel = held = 0.0
    for parameter in anatomy.parameters:
        if parameter.block is None:
            continue
        inside = parameter.name.removeprefix(f"{anatomy.blocks[parameter.block].name}.")
        if block_part(inside.split(".")[0]) == part:
            numel += parameter.numel
            held += parameter.numel / tensor_parts(parameter.shares, tensor)
    return held / numel if numel else 1.0


_KEPT = 8
"""Traces of different lengths, formats and models kept during one search."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """Configuration as a cache key: equal to those with the same `parts`."""

    config: RunConfig = field(compare=False)
    parts: Hashable


def traced_model(config: RunConfig) -> TracedModel | None:
    """Return the trace of a model without a closed form; None for a model with one.

    Raises:
        TrainctlError: The model cannot be traced.
    """
    model = config.model
    if not model.needs_trace:
        return None
    parts = (
        model.path,
        model.is_module and config.parallelism.tensor,
        repr(getattr(model, "arguments", "")),
        model.attention,
        tuple(model.anatomy),
        repr(config.precision),
        config.training.sequence_length,
        config.data.mask_documents,
    )
    return _traced_of_key(ConfigKey(config, parts))


def known_traced_model(config: RunConfig) -> TracedModel | None:
    """Return the trace if an earlier command has made it, otherwise None; starts no process."""
    if not config.model.needs_trace:
        return None
    found = known_trace(to_plain(config), family=_family(config))
    return None if found is None else TracedModel.from_json(found)


def trace_model(config: RunConfig, folder: Path | None = None) -> TracedModel:
    """Return the trace of any model, made in a child process if it is not cached.

    Args:
        folder: Where the user's own code is looked up; None is the current directory.

    Raises:
        TrainctlError: The model cannot be built or traced; says why, and names the file.
    """
    found = trace_in_child(to_plain(config), folder, family=_family(config))
    return TracedModel.from_json(found)


def _family(config: RunConfig) -> str:
    return repr(load_spec("model", config.model.family))


@lru_cache(maxsize=_KEPT)
def _traced_of_key(asked: ConfigKey) -> TracedModel:
    return trace_model(asked.config)


def compare_with_closed_form(traced: TracedModel, plan: LayoutPlan) -> dict[str, dict[str, int]]:
    """Return parameters and activation bytes of the trace beside those of the closed form."""
    config = plan.config
    found = {
        "parameters": {"traced": traced.anatomy.total},
        "block_bytes_per_token": {"traced": traced.block.saved},
    }
    if config.model.has_closed_form:
        closed = block_activations(
            config.model,
            sequence_length=config.training.sequence_length,
            element=compute_bytes(plan),
            autocast=config.precision.autocast,
        )
        found["parameters"]["closed_form"] = count_parameters(config.model).total
        found["block_bytes_per_token"]["closed_form"] = closed.saved
    return found


def teacher_phase(plan: LayoutPlan, runtime: int) -> dict[str, Components]:
    """Return the memory of a device while the teacher computes, as a phase of its own.

    Each rank holds the whole teacher, before the student is built. Empty without distillation, or
    if the teacher's size is not known.
    """
    elements, logits = _teacher_elements(plan), tokens_per_rank(plan) * plan.config.model.vocab_size
    if elements is None:
        return {}
    element = BYTES[number_formats(plan.config.precision).weights]
    return {
        "teacher": Components(
            parameters=element * elements,
            logits=compute_bytes(plan) * logits + chunk_logit_bytes(plan, copies=3),
            runtime=runtime,
        )
    }


def store_notes(plan: RunPlan) -> Iterator[str]:
    """Say what the store takes on disk, and what computing it costs."""
    config = plan.config.objective
    if not isinstance(config, DistillConfig):
        return
    row, elements = row_bytes(config, plan.config.model.vocab_size), _teacher_elements(plan)
    yield (
        f"The teacher's log-probabilities take {row:,} bytes on disk for each label of the corpus: "
        f"{row * 1e9 / GIB:,.0f} GiB for a billion."
    )
    if elements is None:
        yield "The teacher is not known, so its pass before the first step is not counted."
    else:
        yield (
            f"The teacher's pass before the first step takes {2 * elements:.2g} FLOPs a token, "
            "once for each corpus."
        )


def _teacher_elements(plan: LayoutPlan) -> int | None:
    """Return the number of the teacher's weights; None if there is none, or it cannot be read."""
    config = plan.config.objective
    if not isinstance(config, DistillConfig) or config.teacher is None:
        return None
    path = local_path(config.teacher)
    manifests = [path / "manifest.json", *sorted(path.glob("checkpoints/step-*/manifest.json"))]
    try:
        for manifest in reversed(manifests):
            if manifest.is_file():
                found: dict[str, Any] = json.loads(manifest.read_bytes())
                if "base" in found:  # an adapter's checkpoint has no others
                    return None
                return sum(int(math.prod(shape)) for shape in found["shapes"].values())
        return sum(math.prod(each.shape) for each in stored_tensors(path).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, TrainctlError):
        return None
