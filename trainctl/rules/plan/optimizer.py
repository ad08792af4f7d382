"""Rules about the optimizer: partitioning of its update, and its parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainctl.config.schema import Accelerator, LrScaling, OffloadDevice
from trainctl.errors import Finding
from trainctl.options.optimizer import Maker, spec_of
from trainctl.plan.optimizers import refusals
from trainctl.plan.trainable import trainable
from trainctl.rules.plan.draft import Draft, error, warning


def optimizer_fits_the_layout(draft: Draft) -> Iterator[Finding]:
    """What the table of optimizers allows of stages, offload, shards and formats of states."""
    if not draft.config.trains_itself:
        return  # DeepSpeed builds the optimizer and reports what it refuses
    kind = draft.config.optimizer.kind
    for refusal in refusals(draft.config):
        yield error(
            refusal.key,
            f"{refusal.key}={refusal.value} with optimizer.kind={kind}: {refusal.why}",
            f"{refusal.nearest}, or optimizer=adamw",
        )


def groups_match_parameters(draft: Draft) -> Iterator[Finding]:
    """Each entry of optimizer.groups is the first to match some parameter that trains."""
    config = draft.config
    if not config.optimizer.groups or config.model.is_unread:
        return
    left = [tensor.name for tensor in trainable(config).trained]
    names_are_known = config.model.factory is None
    for index, entry in enumerate(config.optimizer.groups):
        key = f"optimizer.groups[{index}]"
        try:
            pattern = re.compile(entry.match)
        except re.error as problem:
            yield error(
                "optimizer.groups",
                f"{key}.match={entry.match} is not a regular expression: {problem}",
                r"such as match: 'embed_tokens|wte', or match: 'layers\.[0-3]\.'",
            )
            continue
        for name, limit, is_legal in (
            ("lr_factor", "above 0", entry.lr_factor > 0),
            ("weight_decay", "at least 0", (entry.weight_decay or 0) >= 0),
            ("gradient_clipping", "at least 0", (entry.gradient_clipping or 0) >= 0),
        ):
            if not is_legal:
                value = getattr(entry, name)
                yield error(
                    "optimizer.groups", f"{key}.{name}={value:g} is not {limit}", f"{name}: 1"
                )
        matched = [name for name in left if pattern.search(name)]
        if names_are_known and (not matched or not entry.match):
            what = "is empty" if not entry.match else "matches no parameter that is left for it"
            yield error(
                "optimizer.groups",
                f"{key}.match={entry.match!r} {what}; the first entry that matches holds",
                f"the names are such as {left[0]}" if left else "leave it out",
            )
        left = [name for name in left if name not in set(matched)]


def scaled_rate_has_its_batch(draft: Draft) -> Iterator[Finding]:
    """A rate that follows the batch size was tuned at one."""
    optimizer = draft.config.optimizer
    if optimizer.lr_scaling is LrScaling.none or optimizer.lr_scaling_batch_size is not None:
        return
    size = draft.batch.global_batch_size if draft.batch is not None else 256
    key = "optimizer.lr_scaling_batch_size"
    yield error(
        key,
        f"optimizer.lr_scaling={optimizer.lr_scaling.value} needs {key}, the global batch in "
        "sequences that optimizer.lr is meant for",
        f"{key}={size} leaves optimizer.lr as it is",
    )


def fused_kernel_is_there(draft: Draft) -> Iterator[Finding]:
    """One kernel for the update: not for every kind, and Lion's is a GPU's."""
    config = draft.config
    spec = spec_of(config.optimizer)
    if not config.optimizer.fused or not config.trains_itself:
        return
    key = "optimizer.fused"
    if spec.fused_by is None:
        yield error(
            key, f"{key}=true: optimizer.kind={spec.name} has no fused kernel", f"{key}=null"
        )
    elif config.offload.optimizer is not OffloadDevice.none:
        yield warning(
            key, f"{key}=true is for a device, and the optimizer is in host memory", f"{key}=null"
        )
    elif spec.fused_by is Maker.deepspeed and draft.hardware.accelerator is Accelerator.cpu:
        yield error(
            key,
            f"{key}=true: {spec.name.title()}'s kernel is a GPU's, the hardware is cpu",
            f"{key}=null",
        )
