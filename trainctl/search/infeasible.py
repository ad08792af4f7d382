"""Reasons for a search without result: the rules, the global batch, or memory."""

from __future__ import annotations

from math import ceil, floor, inf

from trainctl.config.quantities import memory_text
from trainctl.errors import ExitCode, Finding
from trainctl.search.assess import assess
from trainctl.search.space import Space

NOT_SHARED, NOTHING_FITS = "TC158", "TC159"

SHARING = (
    "parallelism",
    "parallelism.data",
    "parallelism.tensor",
    "parallelism.pipeline",
    "parallelism.sequence",
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


def why_no_plan(space: Space, least_bytes: int | None) -> tuple[Finding, ...]:
    """Return what to change so that a search finds something.

    All candidates of `space` have been tried. `least_bytes` is the memory of the smallest budgeted
    variant; None if none was budgeted.
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
        return (_not_shared(space, key, legal),)
    larger = f", or a batch that more ranks can share, from {key}={legal[-1]} on" if legal else ""
    return (_does_not_fit(space, least_bytes, larger),)


def _not_shared(space: Space, key: str, legal: list[int]) -> Finding:
    shares = space.left_out.shares
    nearest = min(shares, key=lambda share: abs(share - space.sequences))
    length = "" if space.exactly else f" x {space.config.training.sequence_length:,} tokens"
    asked = getattr(space.config.training, key.partition(".")[2])
    return Finding(
        rule=NOT_SHARED,
        key=key,
        message=f"{key}={asked} cannot be shared by the ranks of any layout that is left: the "
        f"nearest takes multiples of {nearest}{length}",
        hint=f"nearest legal: {key}={' or '.join(map(str, legal))}{_left_open(space, SHARING)}",
    )


def _does_not_fit(space: Space, least_bytes: int | None, larger: str) -> Finding:
    hardware, states = space.hardware, space.left_out.least_bytes
    capacity = hardware.device_memory_bytes
    of = f" of {memory_text(capacity)}" if capacity else ""
    needs = ""
    if least_bytes is not None:
        needs = f": the least that was tried needs {memory_text(least_bytes)}"
    elif states < inf:
        needs = f": weights and optimizer states alone need {memory_text(states)}"
    settled = _left_open(space, (*SHARING, *SAVING))
    return Finding(
        rule=NOTHING_FITS,
        key="hardware",
        message=f"no layout of {space.config.model.name} fits the devices{of} of "
        f"{hardware.name}{needs}",
        hint=f"more or larger devices{larger}{settled}",
        exit_code=ExitCode.does_not_fit,
    )


def _left_open(space: Space, keys: tuple[str, ...]) -> str:
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
