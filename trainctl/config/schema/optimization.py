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
    lr_factor: float = option(1.0, "Multiplier of the learning rate.", above=0)
    weight_decay: float | None = option(
        None, "Weight decay of these parameters; none keeps the optimizer's.", minimum=0
    )
    gradient_clipping: float | None = option(
        None,
        "Maximum gradient norm of this parameter group, applied before global clipping; none or "
        "0 sets no limit.",
        minimum=0,
    )


@dataclass
class OptimizerConfig:
    """Update rule and its hyperparameters."""

    units: ClassVar[str] = "optimizer"

    kind: str = option("adamw", "Update rule.", units="optimizer")
    lr: float = option(3e-4, "Peak learning rate; the schedule scales it.", above=0)
    weight_decay: float = option(
        0.1,
        "Decoupled weight decay of matrices; norms, biases and embeddings have none.",
        minimum=0,
    )
    decay_embeddings: bool = option(False, "Apply weight_decay to embeddings too.")
    groups: list[GroupOverride] = option(
        [],
        "Overrides for parameter groups: entries of match (a regular expression on parameter "
        "names), lr_factor, weight_decay and gradient_clipping; the first entry that matches "
        "applies.",
        example="[{match: norm, lr_factor: 0.5}]",
    )
    layer_lr_decay: float = option(
        1.0,
        "Layer-wise learning rate decay: factor per block between a parameter and the output.",
        above=0,
        maximum=1,
    )
    fused: bool | None = option(
        None,
        "Use the optimizer's fused kernel; none does so on accelerators if the optimizer has one.",
    )
    gradient_clipping: float = option(
        1.0,
        "Maximum global gradient norm; 0 switches clipping off. gradients.adaptive_clipping "
        "replaces it.",
        minimum=0,
    )
    lr_scaling: LrScaling = option(
        LrScaling.none,
        "Scale lr and matrix_lr, tuned for lr_scaling_batch_size, with "
        "training.global_batch_size: linearly or by its square root.",
    )
    lr_scaling_batch_size: int | None = option(
        None, "Global batch size that lr was tuned for.", unit="sequences", minimum=1
    )


class ScheduleUnit(Enum):
    """Variable that the learning rate is a function of. Phases always begin and end with a step."""

    steps = "steps"
    tokens = "tokens"


@dataclass
class ScheduleConfig:
    """Learning rate over the run; its phases begin and end with an optimizer step."""

    units: ClassVar[str] = "schedule"

    kind: str = option(
        "cosine", "Shape of the learning rate schedule after the warmup.", units="schedule"
    )
    unit: ScheduleUnit = option(
        ScheduleUnit.steps,
        "Unit of the schedule's progress and fractions: steps or tokens, which differ under a "
        "batch ramp.",
    )
    warmup_steps: int | None = option(
        None,
        "Length of the linear warmup; none derives it from warmup_tokens or warmup_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    warmup_tokens: int | None = option(
        None,
        "Length of the linear warmup, if warmup_steps is none; rounded up to a whole step.",
        unit="tokens",
        minimum=0,
        needs=(lambda s: s.warmup_steps is None, "schedule.warmup_steps=null, which replaces it"),
    )
    warmup_fraction: float = option(
        0.02,
        "Length of the linear warmup as a fraction of the run, if neither warmup_steps nor "
        "warmup_tokens is set.",
        minimum=0,
        maximum=1,
        needs=(
            lambda s: s.warmup_steps is None and s.warmup_tokens is None,
            "schedule.warmup_steps=null and warmup_tokens=null, which replace it",
        ),
    )
    warmup_from_zero: bool = option(
        False,
        "Begin the warmup with an update at rate 0, as transformers and GPT-NeoX do; by default "
        "the last update of the warmup is at the peak.",
    )


@dataclass
class ObjectiveConfig:
    """Training objective: next-token prediction, or preference between two answers."""

    units: ClassVar[str] = "objective"

    kind: str = option(
        "next_token", "Training objective, which defines the loss.", units="objective"
    )


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
        0.0,
        "Maximum absolute value of a gradient element; 0 switches clipping by value off.",
        minimum=0,
    )
    adaptive_clipping: AdaptiveClipping = option(
        AdaptiveClipping.none,
        "Derive the clipping threshold from recent gradient norms: a percentile of them, or a "
        "multiple of their mean; replaces optimizer.gradient_clipping.",
    )
    adaptive_percentile: float = option(
        10.0,
        "adaptive_clipping=percentile: percentile of the recent norms that is the threshold.",
        unit="percent",
        minimum=0,
        maximum=100,
    )
    adaptive_factor: float = option(
        1.5, "adaptive_clipping=mean: multiple of the mean norm that is the threshold.", above=0
    )
    adaptive_window: int = option(
        1000,
        "Number of recent accepted updates whose norms are used.",
        unit="optimizer steps",
        minimum=1,
    )
    centralize: bool = option(
        False,
        "Gradient centralization: subtract from each row of a matrix's gradient its mean over "
        "the inputs.",
    )
    noise: float = option(
        0.0,
        "Variance of the Gaussian gradient noise at the first update; 0 switches it off.",
        minimum=0,
    )
    noise_decay: float = option(
        0.55,
        "Decay exponent of the noise: the variance at update t, from 0, is noise / (1 + "
        "t)^noise_decay.",
        minimum=0,
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
        "Response to a bad loss or gradient norm: stop keeps the last good checkpoint; warn "
        "continues after a spike, but stops if a value is not finite.",
    )
    spike_factor: float | None = option(
        None,
        "Multiple of its running mean above which a loss is bad; none detects only NaN.",
        above=1,
    )
    norm_spike_factor: float | None = option(
        None,
        "Multiple of its running mean above which a gradient norm is bad; none detects only NaN.",
        above=1,
    )
    loss_limit: float | None = option(
        None,
        "Absolute limit above which a loss is bad, from the first step on.",
        unit="nats",
        above=0,
    )
    norm_limit: float | None = option(
        None, "Absolute limit above which a gradient norm is bad, from the first step on.", above=0
    )
    spike_window: int = option(
        100,
        "Window of the exponential running means, in accepted steps.",
        unit="optimizer steps",
        minimum=1,
    )
    spike_after_steps: int = option(
        20,
        "Number of accepted steps in the running means before spikes are detected.",
        unit="optimizer steps",
        minimum=1,
    )
    max_interventions: int = option(
        3, "Maximum number of consecutive interventions before the run stops.", minimum=0
    )
    rewind_lr_factor: float = option(
        1.0,
        "Factor that each rewind applies to the learning rate for the rest of the run.",
        above=0,
        maximum=1,
    )
    z_loss: float = option(
        0.0, "Weight of the z-loss: the squared log-normalizer of the output softmax.", minimum=0
    )


@dataclass
class ExpertsConfig:
    """Load balancing of experts in a sparse model; no effect on a dense model."""

    auxiliary_loss: float | None = option(
        None,
        "Weight of the load-balancing loss, computed per sequence (arXiv:2101.03961, equation "
        "4); none: router_aux_loss_coef of the model's config.json, if its output_router_logits "
        "is true, else 0.",
        minimum=0,
    )
    z_loss: float = option(
        0.0,
        "Weight of the router z-loss: the squared log-normalizer of the routers "
        "(arXiv:2202.08906, equation 5).",
        minimum=0,
    )
    bias_update_rate: float = option(
        0.0,
        "Step size of the routing bias for auxiliary-loss-free balancing: added for experts with "
        "fewer tokens than the mean, subtracted for the others (arXiv:2408.15664), if routers "
        "have such a bias; 0 keeps it fixed.",
        minimum=0,
    )
    expected_load: float | None = option(
        None,
        "Tokens of the busiest expert over the mean, for predicted step times beside an expert "
        "axis: mean of experts.load_by_layer in a run's records; none: 1.04 with a "
        "bias_update_rate, else 1.62 (arXiv:2408.15664, table 2).",
        minimum=1,
    )
