"""How weights are updated: optimizer, schedule, and what is done when a step goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from trainctl.config.schema.option import option


class LrScaling(Enum):
    """How the learning rate follows the batch size."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


@dataclass
class GroupOverride:
    """Parameters that learn otherwise than the rest."""

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
    """The update rule and its hyperparameters."""

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


class ScheduleKind(Enum):
    """Shape of the learning rate over the run, after the warmup."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    polynomial = "polynomial"
    exponential = "exponential"
    step = "step"
    inverse_sqrt = "inverse_sqrt"
    one_cycle = "one_cycle"
    cyclic = "cyclic"
    cosine_restarts = "cosine_restarts"
    milestones = "milestones"
    plateau = "plateau"


class DecayShape(Enum):
    """Shape of the last phase of `wsd`."""

    linear = "linear"
    cosine = "cosine"
    one_minus_sqrt = "one_minus_sqrt"


class ScheduleUnit(Enum):
    """What the learning rate is a function of, besides where its phases begin and end."""

    steps = "steps"
    tokens = "tokens"


@dataclass
class ScheduleConfig:
    """Learning rate over the run; its phases begin and end with an optimizer step."""

    kind: ScheduleKind = option(ScheduleKind.cosine, "Shape after the warmup.")
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
    )
    warmup_fraction: float = option(
        0.02, "Warmup as a share of the run, if neither is given.", minimum=0, maximum=1
    )
    floor_ratio: float | None = option(
        None,
        "Final, or lowest, learning rate over the peak; none is the kind's own, which the plan "
        "shows: a tenth for cosine, 0 for step.",
        minimum=0,
        maximum=1,
    )
    decay_steps: int | None = option(
        None,
        "Length of the decay of `wsd`; none derives it from decay_tokens or decay_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    decay_tokens: int | None = option(
        None,
        "Length of the decay of `wsd`, if decay_steps is none; rounded up to a whole step.",
        unit="tokens",
        minimum=0,
    )
    decay_fraction: float = option(
        0.2,
        "Share of the run that `wsd` decays over, if neither is given.",
        minimum=0,
        maximum=1,
    )
    decay_shape: DecayShape = option(DecayShape.one_minus_sqrt, "Decay of `wsd`.")
    power: float = option(1.0, "Exponent of `polynomial`.", above=0)
    step_every: int | None = option(
        None,
        "Interval of `step`, period of `cyclic`, first cycle of `cosine_restarts`.",
        unit="optimizer steps",
        minimum=1,
    )
    step_every_tokens: int | None = option(
        None,
        "The same in tokens, in place of step_every; needs unit=tokens.",
        unit="tokens",
        minimum=1,
    )
    step_factor: float = option(
        0.1,
        "Factor of `step` at each interval, of `milestones` at each of them, of `plateau` at each "
        "drop.",
        above=0,
        maximum=1,
    )
    restart_factor: int = option(
        1, "Length of each cycle of `cosine_restarts` over that of the one before.", minimum=1
    )
    milestones: list[int] = option(
        [],
        "Where `milestones` drops: numbers of updates since the start of the run, or tokens with "
        "unit=tokens; empty takes milestone_fractions.",
        example="[8000,9000]",
    )
    milestone_fractions: list[float] = option(
        [0.8, 0.9],
        "The same as shares of the run, if milestones is empty.",
        example="[0.8,0.9]",
    )
    plateau_patience: int = option(
        3,
        "`plateau` drops after so many evaluations in a row without a lower held-out loss.",
        unit="evaluations",
        minimum=1,
    )
    plateau_min_delta: float = option(
        0.0,
        "plateau_patience: how much lower the held-out loss has to be to count; less does not.",
        unit="nats",
        minimum=0,
    )


class AdaptiveClipping(Enum):
    """Where the limit of the gradient norm comes from, instead of `optimizer.gradient_clipping`."""

    none = "none"
    percentile = "percentile"
    mean = "mean"


@dataclass
class GradientsConfig:
    """What happens to a gradient between the backward pass and the update.

    In this order: centralised, measured, clipped by value, given noise, clipped by the norm of its
    group, clipped by the norm of all.
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
    """What to do about a loss or gradient norm that is not finite, or a spike of either."""

    warn = "warn"
    stop = "stop"
    skip_step = "skip_step"
    skip_batch = "skip_batch"
    rewind = "rewind"


@dataclass
class StabilityConfig:
    """What to do when a loss or gradient goes wrong; decided by all ranks before the update."""

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
