"""How weights are updated: optimizer, schedule, and what is done when a step goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema.option import option


class OptimizerKind(Enum):
    """Update rule; which ZeRO stage and offload each allows is checked by the rules."""

    adamw = "adamw"
    adam = "adam"
    lion = "lion"
    muon = "muon"
    adamw_8bit = "adamw_8bit"
    adafactor = "adafactor"
    lamb = "lamb"
    sgd = "sgd"


@dataclass
class OptimizerConfig:
    """The update rule and its hyperparameters."""

    kind: OptimizerKind = option(OptimizerKind.adamw, "Update rule.")
    lr: float = option(3e-4, "Peak learning rate; the schedule scales it.", above=0)
    weight_decay: float = option(
        0.1, "Decoupled decay of matrices; norms, biases and embeddings have none.", minimum=0
    )
    beta1: float = option(0.9, "Decay of the first moment.", minimum=0, maximum=0.999999)
    beta2: float = option(0.95, "Decay of the second moment.", minimum=0, maximum=0.999999)
    epsilon: float = option(1e-8, "Added to the root of the second moment.", above=0)
    momentum: float = option(0.95, "Momentum of sgd and muon.", minimum=0, maximum=0.999999)
    matrix_lr: float | None = option(
        None, "Learning rate of muon's matrices; none means lr.", above=0
    )
    decay_embeddings: bool = option(False, "Apply weight_decay to embeddings too.")
    gradient_clipping: float = option(
        1.0, "Largest global gradient norm; 0 switches clipping off.", minimum=0
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


class DecayShape(Enum):
    """Shape of the last phase of `wsd`."""

    linear = "linear"
    cosine = "cosine"
    one_minus_sqrt = "one_minus_sqrt"


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the optimizer step."""

    kind: ScheduleKind = option(ScheduleKind.cosine, "Shape after the warmup.")
    warmup_steps: int | None = option(
        None,
        "Linear warmup; none derives it from warmup_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    warmup_fraction: float = option(
        0.02, "Warmup as a share of the run, when warmup_steps is none.", minimum=0, maximum=1
    )
    floor_ratio: float = option(0.1, "Final learning rate over the peak.", minimum=0, maximum=1)
    decay_fraction: float = option(
        0.2, "Share of the run that `wsd` decays over.", minimum=0, maximum=1
    )
    decay_shape: DecayShape = option(DecayShape.one_minus_sqrt, "Decay of `wsd`.")
    power: float = option(1.0, "Exponent of `polynomial`.", above=0)
    step_every: int | None = option(
        None, "Interval of `step` and period of `cyclic`.", unit="optimizer steps", minimum=1
    )
    step_factor: float = option(0.1, "Factor of `step` at each interval.", above=0, maximum=1)


class OnBadLoss(Enum):
    """What to do about a loss or gradient norm that is not finite."""

    stop = "stop"
    skip_step = "skip_step"
    skip_batch = "skip_batch"
    rewind = "rewind"


@dataclass
class StabilityConfig:
    """What to do when a loss or gradient goes wrong; decided by all ranks before the update."""

    on_bad_loss: OnBadLoss = option(OnBadLoss.stop, "stop keeps the last good checkpoint.")
    spike_factor: float | None = option(
        None,
        "A loss above this multiple of its running mean is bad; none looks for NaN only.",
        above=1,
    )
    max_interventions: int = option(3, "Interventions in a row before the run stops.", minimum=0)
    z_loss: float = option(0.0, "Weight of the squared log-normaliser of the output.", minimum=0)
