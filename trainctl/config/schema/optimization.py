"""Optimization: optimizer, schedule, objective, gradients, and reactions to bad steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from trainctl.config.schema.option import option


class LrScaling(Enum):
    """Scaling of the learning rate with the batch size."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


@dataclass
class GroupOverride:
    """Hyperparameters of a group of parameters that differ from the others'."""

    match: str = option("", "Regular expression, searched for in a parameter's canonical name.")
    lr_factor: float = option(1.0, "Of the learning rate.", above=0)
    weight_decay: float | None = option(
        None, "Their decay; none leaves what the rule gives.", minimum=0
    )
    gradient_clipping: float | None = option(
        None,
        "Largest gradient norm of their group, before all are clipped; none or 0 has no limit.",
        minimum=0,
    )


@dataclass
class OptimizerConfig:
    """Update rule and its hyperparameters."""

    units: ClassVar[str] = "optimizer"

    kind: str = option("adamw", "Update rule.", units="optimizer")
    lr: float = option(3e-4, "Peak learning rate; the schedule scales it.", above=0)
    weight_decay: float = option(
        0.1, "Decoupled decay of matrices; norms, biases and embeddings have none.", minimum=0
    )
    decay_embeddings: bool = option(False, "Apply weight_decay to embeddings too.")
    groups: list[GroupOverride] = option(
        [],
        "Entries of match (a regular expression on parameter names), lr_factor, weight_decay and "
        "gradient_clipping; the first whose match is found holds.",
        example="[{match: norm, lr_factor: 0.5}]",
    )
    layer_lr_decay: float = option(
        1.0,
        "Factor of the learning rate for each block between a parameter and the output.",
        above=0,
        maximum=1,
    )
    fused: bool | None = option(
        None, "Update with one fused kernel; none does on accelerators, for kinds that have one."
    )
    gradient_clipping: float = option(
        1.0,
        "Largest global gradient norm; 0 switches clipping off. gradients.adaptive_clipping takes "
        "its place.",
        minimum=0,
    )
    lr_scaling: LrScaling = option(
        LrScaling.none,
        "Let lr and matrix_lr, tuned for lr_scaling_batch_size, follow training.global_batch_size: "
        "linear or by its square root.",
    )
    lr_scaling_batch_size: int | None = option(
        None, "Global batch that lr is meant for.", unit="sequences", minimum=1
    )


class ScheduleUnit(Enum):
    """Variable that the learning rate is a function of. Phases always begin and end with a step."""

    steps = "steps"
    tokens = "tokens"


@dataclass
class ScheduleConfig:
    """Learning rate over the run; its phases begin and end with an optimizer step."""

    units: ClassVar[str] = "schedule"

    kind: str = option("cosine", "Shape after the warmup.", units="schedule")
    unit: ScheduleUnit = option(
        ScheduleUnit.steps,
        "steps or tokens: what a curve goes along and a share is of, where a batch ramp makes "
        "them differ.",
    )
    warmup_steps: int | None = option(
        None,
        "Linear warmup; none derives it from warmup_tokens or warmup_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    warmup_tokens: int | None = option(
        None,
        "Linear warmup, if warmup_steps is none; rounded up to a whole step.",
        unit="tokens",
        minimum=0,
        needs=(lambda s: s.warmup_steps is None, "schedule.warmup_steps=null, which replaces it"),
    )
    warmup_fraction: float = option(
        0.02,
        "Warmup as a share of the run, if neither is given.",
        minimum=0,
        maximum=1,
        needs=(
            lambda s: s.warmup_steps is None and s.warmup_tokens is None,
            "schedule.warmup_steps=null and warmup_tokens=null, which replace it",
        ),
    )


@dataclass
class ObjectiveConfig:
    """Training objective: next-token prediction, or preference between two answers."""

    units: ClassVar[str] = "objective"

    kind: str = option("next_token", "The loss.", units="objective")


class AdaptiveClipping(Enum):
    """Statistic that the clipping threshold follows, in place of `optimizer.gradient_clipping`."""

    none = "none"
    percentile = "percentile"
    mean = "mean"


@dataclass
class GradientsConfig:
    """Processing of gradients between the backward pass and the update.

    In this order: centralization, measurement of the norm, clipping by value, noise, clipping by
    the norm of a parameter group, clipping by the global norm.
    """

    clip_value: float = option(
        0.0, "Largest absolute value of an element; 0 switches it off.", minimum=0
    )
    adaptive_clipping: AdaptiveClipping = option(
        AdaptiveClipping.none,
        "Limit of the norm from the norms of before: a percentile of them, or a multiple of "
        "their mean; it takes the place of optimizer.gradient_clipping.",
    )
    adaptive_percentile: float = option(
        10.0, "adaptive_clipping=percentile: which one.", unit="percent", minimum=0, maximum=100
    )
    adaptive_factor: float = option(
        1.5, "adaptive_clipping=mean: the multiple of the mean.", above=0
    )
    adaptive_window: int = option(
        1000, "How many of the last accepted updates count.", unit="optimizer steps", minimum=1
    )
    centralize: bool = option(
        False, "Take from each row of a matrix's gradient its mean over the inputs."
    )
    noise: float = option(
        0.0,
        "Variance of the normal noise added at the first update; 0 switches it off.",
        minimum=0,
    )
    noise_decay: float = option(
        0.55, "The variance at update t, from 0, is noise / (1 + t)^noise_decay.", minimum=0
    )


class OnBadLoss(Enum):
    """Reaction to a loss or gradient norm that is not finite, or to a spike of either."""

    warn = "warn"
    stop = "stop"
    skip_step = "skip_step"
    skip_batch = "skip_batch"
    rewind = "rewind"


@dataclass
class StabilityConfig:
    """Reactions to bad losses and gradients; all ranks decide together before the update."""

    on_bad_loss: OnBadLoss = option(
        OnBadLoss.stop,
        "stop keeps the last good checkpoint; warn goes on after a spike, and stops at what is "
        "not finite.",
    )
    spike_factor: float | None = option(
        None,
        "A loss above this multiple of its running mean is bad; none looks for NaN only.",
        above=1,
    )
    norm_spike_factor: float | None = option(
        None,
        "A gradient norm above this multiple of its running mean is bad; none looks for NaN only.",
        above=1,
    )
    loss_limit: float | None = option(
        None,
        "A loss above this is bad, from the first step on and whatever came before.",
        unit="nats",
        above=0,
    )
    norm_limit: float | None = option(
        None,
        "A gradient norm above this is bad, from the first step on and whatever came before.",
        above=0,
    )
    spike_window: int = option(
        100,
        "Accepted steps that the running means go back over, their weights falling.",
        unit="optimizer steps",
        minimum=1,
    )
    spike_after_steps: int = option(
        20,
        "Accepted steps in the means before a spike is looked for.",
        unit="optimizer steps",
        minimum=1,
    )
    max_interventions: int = option(3, "Interventions in a row before the run stops.", minimum=0)
    rewind_lr_factor: float = option(
        1.0,
        "Each rewind multiplies the learning rate by this, to the end of the run.",
        above=0,
        maximum=1,
    )
    z_loss: float = option(0.0, "Weight of the squared log-normaliser of the output.", minimum=0)


@dataclass
class ExpertsConfig:
    """Load balancing of experts in a sparse model; no effect on a dense model."""

    auxiliary_loss: float | None = option(
        None,
        "Weight of a loss that is least where each sequence goes to all experts alike "
        "(arXiv:2101.03961, equation 4); none: router_aux_loss_coef of the model's config.json, if "
        "its output_router_logits is true, else 0.",
        minimum=0,
    )
    z_loss: float = option(
        0.0,
        "Weight of the squared log-normaliser of the routers (arXiv:2202.08906, equation 5).",
        minimum=0,
    )
    bias_update_rate: float = option(
        0.0,
        "What a step adds to the choice of experts with fewer tokens than the mean, and takes from "
        "the others (arXiv:2408.15664), where routers have such a bias; 0 leaves it as it is.",
        minimum=0,
    )
