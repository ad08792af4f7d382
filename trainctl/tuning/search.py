"""Search for the fastest legal plans of a model that fit given machines.

Every layout, batch and kind of recomputation is timed by the step-time model, which is cheap. Then
the candidates are budgeted from the fastest on, and those that fit are checked by the real rules,
until enough plans are found. Simple arithmetic excludes candidates that cannot be legal or fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from typing import Any

from trainctl.config.keys import leaves
from trainctl.config.quantities import memory_text
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding
from trainctl.hardware import Hardware
from trainctl.memory.budget import MemoryBudget, device_budget
from trainctl.memory.constants import GIB
from trainctl.memory.traced import traced_model
from trainctl.plans.flops import flops_of_run, utilisation
from trainctl.plans.types import RunPlan
from trainctl.tuning.assess import Assessment, assess
from trainctl.tuning.rates import device_rates
from trainctl.tuning.space import AXES, RESOLUTION, VARIANT_KEYS, Candidate, ShownLayout, Space
from trainctl.tuning.speed import TIME_ERROR, StepTime, Values, overrides, with_values

MOST_BUDGETS = 2000
"""Budgets per kind of offload before it is given up; each takes about half a millisecond."""
MOST_REFUSALS = 50
"""Rule refusals of fitting variants per kind of offload before it is given up: the problem then
does not depend on the layout. Another kind of offload may still be legal, by using less host
memory.
"""
MOST_REFUSALS_OF_A_LAYOUT = 4
"""Refusals of a layout's variants by one rule, for a key that they share, before the layout is
given up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedVariant:
    """Faster variant of a plan that is illegal or does not fit."""

    values: Values
    """Keys that differ from the plan's."""
    saved: float
    """Fraction of the plan's time per token that the variant would save. Step times do not compare:
    a batch in tokens is rounded differently in another layout.
    """
    reason: str
    """Why the variant is rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """Plan that is legal and certainly fits."""

    values: Values
    """Keys that the search chose."""
    plan: RunPlan
    budget: MemoryBudget
    time: StepTime
    """Predicted time of an optimizer step."""
    findings: tuple[Finding, ...]
    """Warnings of the rules."""
    rejected: RejectedVariant | None
    """Closest faster variant of the same layout, which is not possible; None without one."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Command-line overrides of the chosen keys."""
        return overrides(self.values)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.plan.batch.tokens_per_step / self.time.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.plan.mesh.world_size

    @property
    def seconds_to_train(self) -> float:
        """Predicted seconds of all optimizer steps."""
        return self.plan.total_steps * self.time.seconds

    @property
    def tokens_to_train(self) -> int:
        return self.plan.total_steps * self.plan.batch.tokens_per_step

    def cost_per_billion_tokens(self, price: float) -> float:
        """Return the cost of a billion tokens; `price` is per device and hour."""
        hours = 1e9 / self.tokens_per_second / 3600
        return price * self.plan.mesh.world_size * hours

    def between(self, amount: float) -> tuple[float, float]:
        """Return the range of an amount that is proportional to the predicted time of a step."""
        return amount / (1 + TIME_ERROR), amount / (1 - TIME_ERROR)

    def time_compared_with(self, other: FoundPlan) -> tuple[float, dict[str, float]]:
        """Return the relative change of the time per token, in all and by part of a step."""
        size = self.plan.batch.tokens_per_step / other.plan.batch.tokens_per_step
        before = other.time.seconds * size
        if not before:
            return 0.0, {}
        parts = {
            name: (getattr(self.time, name) - getattr(other.time, name) * size) / before
            for name in {**self.time.parts, **other.time.parts}
        }
        return self.time.seconds / before - 1, parts

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs utilisation; None if the device's peak is unknown."""
        config = self.plan.config
        return utilisation(
            flops_of_run(config, self.plan.batch.sequence_length) * self.plan.batch.tokens_per_step,
            self.time.seconds,
            devices=self.plan.mesh.world_size,
            peak_tflops=self.plan.hardware.peak_tflops(config.precision.compute),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search."""

    found: tuple[FoundPlan, ...]
    """Best plan of each layout, the fastest first; among equally fast plans, the simplest."""
    hardware: Hardware
    """Machines that the plans are for."""
    rates_are_known: bool
    """Whether the hardware's speed is known; else an A100's is used, and only the order counts."""
    has_length: bool
    """Whether the configuration sets the length of the training."""
    timed: int
    """Number of timed variants."""
    budgeted: int
    """Number of variants whose memory was computed."""
    candidates: tuple[Candidate, ...] = ()
    """Variants that were timed."""
    findings: tuple[Finding, ...] = ()
    """Problems of the fastest variant, if nothing was found."""
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Overrides that the user did not give, each with its reason."""

    def to_json(self, price: float | None = None) -> dict[str, Any]:
        """Return the form of `trainctl plan --json`; `price` is per device and hour."""
        return {
            "schema": 1,
            "hardware": self.hardware.name,
            "rates_are_known": self.rates_are_known,
            "variants": self.timed,
            "assumed": list(self.assumed),
            "plans": [self.plan_to_json(found, price) for found in self.found],
        }

    def plan_to_json(self, found: FoundPlan, price: float | None = None) -> dict[str, Any]:
        """Return one of the plans; fields that depend on unknown rates are null."""
        mesh, batch, memory = found.plan.mesh, found.plan.batch, found.budget
        low, high = found.between(found.time.seconds)
        speed: dict[str, Any] = {
            "seconds_per_step": found.time.seconds,
            "seconds_per_step_low": low,
            "seconds_per_step_high": high,
            "seconds_by_part": dict(found.time.parts),
            "tokens_per_second_per_device": found.tokens_per_second_per_device,
            "model_flops_utilisation": found.utilisation,
            "seconds_to_train": found.seconds_to_train if self.has_length else None,
            "cost_per_billion_tokens": None
            if price is None
            else found.cost_per_billion_tokens(price),
        }
        if not self.rates_are_known:
            speed = dict.fromkeys(speed)
        return {
            "overrides": list(found.overrides),
            "mesh": {axis: getattr(mesh, axis) for axis in ("data", *AXES)},
            "zero_stage": found.plan.config.zero_stage.stage,
            "global_batch_size": batch.global_batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
            **speed,
            "relative_time": self.found[0].tokens_per_second / found.tokens_per_second,
            "device_peak_bytes": memory.device_peak_bytes,
            "device_peak_high_bytes": memory.device_peak_high_bytes,
            "host_bytes_per_node": memory.host.bytes_per_node,
            "next_faster": self._next_faster(found.rejected),
            "findings": [finding.to_json() for finding in found.findings],
        }

    def _next_faster(self, rejected: RejectedVariant | None) -> dict[str, Any] | None:
        if rejected is None:
            return None
        return {
            "overrides": list(overrides(rejected.values)),
            "time_saved_per_token": rejected.saved if self.rates_are_known else None,
            "reason": rejected.reason,
        }


@dataclass
class _State:
    """Intermediate results of a search."""

    found: dict[ShownLayout, FoundPlan] = field(default_factory=dict)
    order: dict[ShownLayout, tuple[int, int, float]] = field(default_factory=dict)
    rejected: dict[ShownLayout, list[tuple[Candidate, str]]] = field(default_factory=dict)
    too_large: dict[ShownLayout, list[Candidate]] = field(default_factory=dict)
    closed: set[ShownLayout] = field(default_factory=set)
    refusals: Counter[tuple[ShownLayout, str]] = field(default_factory=Counter)
    budgeted: int = 0
    least_bytes: int | None = None
    first: tuple[Finding, ...] = ()


def search(
    config: RunConfig, hardware: Hardware, *, fixed: frozenset[str] = frozenset(), top: int = 5
) -> Search:
    """Return the `top` fastest plans, each with another layout.

    `config` is the training to plan; the searched keys are overridden, except those in `fixed`:
    keys, or whole groups, that the user has set.

    Raises:
        TrainctlError: The global batch is not configured.
    """
    space = Space(config, hardware, fixed)
    state = _State()
    candidates: list[Candidate] = []
    # Offloading is never faster: it is tried only if too few plans fit without it.
    for offloads in space.offloads:
        queue = sorted(space.candidates(offloads), key=lambda candidate: candidate.order)
        candidates += queue
        _try_candidates(queue, config, hardware, state, top)
        if len(state.found) >= top:
            break
    best = sorted(state.found, key=lambda layout: state.order[layout])[:top]
    found = [state.found[layout] for layout in best]
    return Search(
        found=tuple(found),
        hardware=hardware,
        rates_are_known=device_rates(hardware, config.precision).is_known,
        has_length=config.training.steps is not None or config.training.tokens is not None,
        timed=len(candidates),
        budgeted=state.budgeted,
        candidates=tuple(candidates),
        findings=() if found else state.first or explain_infeasible(space, state.least_bytes),
    )


def _try_candidates(
    queue: list[Candidate], config: RunConfig, hardware: Hardware, state: _State, top: int
) -> None:
    """Try the candidates in order until `top` more layouts have a plan."""
    smallest: dict[ShownLayout, Candidate] = {}
    for candidate in queue:
        known = smallest.setdefault(candidate.layout, candidate)
        if candidate.size < known.size:
            smallest[candidate.layout] = candidate
    wanted, refused = len(state.found) + top, 0
    most_budgets = state.budgeted + MOST_BUDGETS
    for candidate in queue:
        if state.budgeted >= most_budgets or len(state.found) >= wanted:
            return
        if refused >= MOST_REFUSALS and not state.found:
            return
        layout = candidate.layout
        if layout in state.found or layout in state.closed or _is_hopeless(candidate, state):
            continue
        if layout not in state.too_large and not _certainly_fits(smallest[layout], state):
            state.closed.add(layout)
        elif _certainly_fits(candidate, state):
            kernels = with_values(config, candidate.values).kernels  # with reasons for open ones
            result = assess(replace(candidate.variant.sketch.config, kernels=kernels), hardware)
            errors = tuple(item for item in result.findings if item.is_error)
            if not errors:
                state.found[layout] = _found_plan(candidate, result, state, config)
                state.order[layout] = candidate.order
            else:
                state.first = state.first or errors
                refused += 1
                state.rejected.setdefault(layout, []).append((candidate, errors[0].message))
                _count_refusal(layout, errors[0], state)


def _count_refusal(layout: ShownLayout, error: Finding, state: _State) -> None:
    """Close the layout if one rule keeps refusing it for a key that its variants share."""
    if error.key in VARIANT_KEYS:
        return
    state.refusals[layout, error.rule] += 1
    if state.refusals[layout, error.rule] >= MOST_REFUSALS_OF_A_LAYOUT:
        state.closed.add(layout)


def _certainly_fits(candidate: Candidate, state: _State) -> bool:
    """Return True if the candidate certainly fits on a device; otherwise record it as rejected."""
    state.budgeted += 1
    sketch = candidate.variant.sketch
    memory = device_budget(sketch, traced_model(sketch.config))
    if memory.fits or not memory.device_capacity_bytes:
        return True
    needs = memory.device_peak_high_bytes
    state.least_bytes = needs if state.least_bytes is None else min(needs, state.least_bytes)
    reason = (
        f"a device would need {memory.device_peak_bytes / GIB:.1f} GiB (between "
        f"{memory.device_peak_low_bytes / GIB:.1f} and {memory.device_peak_high_bytes / GIB:.1f})"
    )
    state.rejected.setdefault(candidate.layout, []).append((candidate, reason))
    state.too_large.setdefault(candidate.layout, []).append(candidate)
    return False


def _is_hopeless(candidate: Candidate, state: _State) -> bool:
    """Return True if a smaller candidate of the same layout was already too large."""
    batch = candidate.variant.sketch.batch.micro_batch_size
    for other in state.too_large.get(candidate.layout, ()):
        keeps_as_much = all(
            own >= its for own, its in zip(candidate.retained, other.retained, strict=True)
        )
        if keeps_as_much and batch >= other.variant.sketch.batch.micro_batch_size:
            return True
    return False


def _found_plan(
    candidate: Candidate, result: Assessment, state: _State, config: RunConfig
) -> FoundPlan:
    assert result.plan is not None and result.budget is not None
    rejected = None
    for other, reason in state.rejected.get(candidate.layout, ()):
        saved = 1 - other.variant.seconds_per_token / candidate.variant.seconds_per_token
        if saved > RESOLUTION:  # the last one is the closest in time
            values = _changed_values(other.values, candidate.variant.sketch.config)
            rejected = RejectedVariant(values=values, saved=saved, reason=reason)
    return FoundPlan(
        values=_changed_values(candidate.values, config),
        plan=result.plan,
        budget=result.budget,
        time=candidate.variant.time,
        findings=result.findings,
        rejected=rejected,
    )


def _changed_values(values: Values, config: RunConfig) -> dict[str, Any]:
    changed = {}
    for key, value in values.items():
        section, name = key.split(".")
        # A key that the present kind's section lacks gets its default with the new kind.
        if getattr(getattr(config, section), name, leaves()[key].default) != value:
            changed[key] = value
    return changed


NOT_SHARED, NOTHING_FITS = "TC158", "TC159"

SHARING = (
    "parallelism",
    "parallelism.data",
    "parallelism.tensor",
    "parallelism.pipeline",
    "parallelism.sequence",
    "parallelism.context",
    "zero_stage",
    "zero_stage.stage",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
)
"""Keys that decide how many sequences the ranks take at a time; searched unless set."""
SAVING = (
    "offload",
    "offload.optimizer",
    "offload.parameters",
    "activation_checkpointing",
    "activation_checkpointing.mode",
    "activation_checkpointing.offload_to_cpu",
    "kernels",
    "kernels.cross_entropy",
)
"""Other keys that are searched to save memory."""


def explain_infeasible(space: Space, least_bytes: int | None) -> tuple[Finding, ...]:
    """Return what to change so that a search finds something.

    All candidates of `space` have been tried. `least_bytes` is the upper bound of the memory of the
    smallest budgeted variant; None if none was budgeted.
    """
    left_out = space.left_out
    key, legal = _nearest_batches(space)
    not_memory = tuple(
        finding
        for finding in assess(space.base, space.hardware).findings
        if finding.is_error
        and finding.exit_code is not ExitCode.does_not_fit
        # A batch that only the config's own layout cannot share is not the reason.
        and (finding.key != key or left_out.shares)
    )
    if not_memory and least_bytes is None:
        return not_memory
    if least_bytes is None and left_out.least_bytes == inf and legal:
        return (_batch_finding(space, key, legal),)
    larger = f", or a batch that more ranks can share, from {key}={legal[-1]} on" if legal else ""
    return (_memory_finding(space, least_bytes, larger),)


def _batch_finding(space: Space, key: str, legal: list[int]) -> Finding:
    shares = space.left_out.shares
    nearest = min(shares, key=lambda share: abs(share - space.sequences))
    length = "" if space.exactly else f" x {space.config.training.sequence_length:,} tokens"
    asked = getattr(space.config.training, key.partition(".")[2])
    return Finding(
        rule=NOT_SHARED,
        key=key,
        message=f"{key}={asked} cannot be shared by the ranks of any layout that is left: the "
        f"nearest takes multiples of {nearest}{length}",
        hint=f"nearest legal: {key}={' or '.join(map(str, legal))}{_hint_to_unset(space, SHARING)}",
    )


def _memory_finding(space: Space, least_bytes: int | None, larger: str) -> Finding:
    hardware, states = space.hardware, space.left_out.least_bytes
    capacity = hardware.device_memory_bytes
    of = f" of {memory_text(capacity)}" if capacity else ""
    needs = ""
    if least_bytes is not None:
        needs = f": the least that was tried needs up to {memory_text(least_bytes)}"
    elif states < inf:
        needs = f": weights and optimizer states alone need {memory_text(states)}"
    settled = _hint_to_unset(space, (*SHARING, *SAVING))
    return Finding(
        rule=NOTHING_FITS,
        key="hardware",
        message=f"no layout of {space.config.model.name} fits the devices{of} of "
        f"{hardware.name}{needs}",
        hint=f"more or larger devices{larger}{settled}",
        exit_code=ExitCode.does_not_fit,
    )


def _hint_to_unset(space: Space, keys: tuple[str, ...]) -> str:
    """Return the part of a hint that names the set keys of `keys`, which a search could choose."""
    settled = [key for key in keys if key in space.fixed]
    return f", or leave {' and '.join(settled)} to the search" if settled else ""


def _nearest_batches(space: Space) -> tuple[str, list[int]]:
    """Return the key of the global batch, and its nearest values that some layout could share.

    There is at most one value below the wanted one and one above, and none if no layout was left
    out because of the batch.
    """
    unit = 1 if space.exactly else space.config.training.sequence_length
    key = "training.global_batch_size" if space.exactly else "training.global_batch_tokens"
    near = {
        whole(space.sequences / share) * share
        for share in space.left_out.shares
        for whole in (floor, ceil)
    }
    below = sorted(count for count in near if 0 < count < space.sequences)
    above = sorted(count for count in near if count > space.sequences)
    return key, [count * unit for count in (*below[-1:], *above[:1])]
