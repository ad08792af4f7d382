"""Scaling of the peak learning rate with the batch size, and the gradient clipping in effect.

`optimizer.lr` is then the rate tuned at `optimizer.lr_scaling_batch_size` sequences, b. At a global
batch of B it is multiplied by

- linear: B / b, for SGD                              (arXiv:1706.02677, the linear scaling rule)
- sqrt: sqrt(B / b), for Adam and its relatives       (arXiv:2205.10287, the square root rule)

With a batch ramp, B is the batch after the ramp.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from trainctl.config.derived import Derived
from trainctl.config.schema import (
    AdaptiveClipping,
    LrScaling,
    OptimizerConfig,
    RunConfig,
)
from trainctl.options.optimizer import spec_of
from trainctl.plan.batches import Batch

SOURCES = {LrScaling.linear: "arXiv:1706.02677", LrScaling.sqrt: "arXiv:2205.10287"}


def lr_scale(optimizer: OptimizerConfig, batch: Batch) -> float:
    """Return the factor of all learning rates; 1 without scaling."""
    if optimizer.lr_scaling is LrScaling.none or optimizer.lr_scaling_batch_size is None:
        return 1.0
    ratio = batch.global_batch_size / optimizer.lr_scaling_batch_size
    return ratio if optimizer.lr_scaling is LrScaling.linear else sqrt(ratio)


def reasons(config: RunConfig, batch: Batch) -> Iterator[Derived]:
    """Yield the scaled rates with their arithmetic, and adaptive clipping if enabled."""
    optimizer, scale = config.optimizer, lr_scale(config.optimizer, batch)
    if optimizer.lr_scaling is not LrScaling.none:
        ratio = (
            f"global_batch_size {batch.global_batch_size} /"
            f" optimizer.lr_scaling_batch_size {optimizer.lr_scaling_batch_size}"
        )
        factor = f"sqrt({ratio})" if optimizer.lr_scaling is LrScaling.sqrt else f"({ratio})"
        source = SOURCES[optimizer.lr_scaling]
        rates = {"lr": optimizer.lr}
        spec = spec_of(optimizer)
        matrix_rate = spec.matrix_rate(optimizer)
        if matrix_rate is not None:
            rates[spec.matrix_lr] = matrix_rate
        for name, rate in rates.items():
            why = f"optimizer.{name} {rate:g} x {factor}, {source}"
            sources = (f"optimizer.{name}", "optimizer.lr_scaling_batch_size")
            yield Derived(key=f"peak_{name}", value=rate * scale, reason=why, sources=sources)
    if config.trains_itself and config.gradients.adaptive_clipping is not AdaptiveClipping.none:
        kind = config.gradients.adaptive_clipping.value
        fixed = f"optimizer.gradient_clipping {optimizer.gradient_clipping:g}"
        why = f"decides alone, in place of {fixed}"
        if config.gradients.adaptive_clipping is AdaptiveClipping.mean:
            why = f"decides alone from the second update on, {fixed} for the first"
        yield Derived(
            key="clip_at",
            value=kind,
            reason=f"gradients.adaptive_clipping={kind} {why}",
            sources=("gradients.adaptive_clipping", "optimizer.gradient_clipping"),
        )
