"""Why a plan is where it is among others, in words."""

from __future__ import annotations

from trainctl.planner.search import FoundPlan, Rejected
from trainctl.planner.speed import StepTime
from trainctl.planner.variants import overrides

NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor-parallel collectives",
    "sequence": "sequence-parallel exchanges",
    "gather": "gathering weights",
    "reduce": "reducing gradients",
    "transfer": "pipeline transfers",
    "bubble": "pipeline bubble",
    "optimizer": "the update",
    "offload": "copies to the host",
}
LEAST_SHARE = 0.005
"""Parts below this are not named."""


def shares(time: StepTime) -> str:
    """What a step's time goes to, the largest part first."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])
    total = time.seconds or 1.0
    named = [f"{NAMES[name]} {s / total:.0%}" for name, s in parts if s / total >= LEAST_SHARE]
    return ", ".join(named)


def why_slower(found: FoundPlan, first: FoundPlan) -> str:
    """What a plan does longer than the first, and shorter, for each token."""
    size = found.plan.batch.tokens_per_step / first.plan.batch.tokens_per_step
    before = first.time.seconds * size
    slower = found.time.seconds / before - 1 if before else 0.0
    changes = sorted(
        (
            ((found.time.parts[name] - first.time.parts[name] * size) / before, name)
            for name in NAMES
        ),
        key=lambda change: -abs(change[0]),
    )
    named = [f"{change:+.0%} {NAMES[name]}" for change, name in changes[:3] if abs(change) >= 0.01]
    return f"{slower:+.1%} time a token" + (f" ({', '.join(named)})" if named else "")


def next_faster(rejected: Rejected, with_share: bool = True) -> str:
    """Name the next faster variant, what it would save of each token's time, and what is wrong."""
    what = " ".join(overrides(rejected.values)) or "the same"
    saved = f" ({rejected.saved:.1%} less time a token)" if with_share else ""
    return f"{what}{saved}, but {rejected.reason}"
