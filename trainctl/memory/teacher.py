"""Memory and disk that distillation adds: the teacher's pass, and the store that it leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from trainctl.errors import TrainctlError
from trainctl.memory.activations import compute_bytes, tokens_per_rank
from trainctl.memory.constants import BYTES, GIB
from trainctl.memory.rank import Components, chunk_logit_bytes
from trainctl.models.local_path import local_path
from trainctl.models.tensors import stored_tensors
from trainctl.options.objective.distill import DistillConfig, row_bytes
from trainctl.plans.settings import number_formats
from trainctl.plans.types import LayoutPlan, RunPlan


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
