"""What a number format to compute in says of itself: where it runs, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec, load
from trainctl.config.schema import DataType, PrecisionConfig, RunConfig
from trainctl.config.schema.option import option

ADAPTIVE = (
    lambda section: section.loss_scale == 0,
    "precision.compute=fp16 with an adaptive loss scale",
)


@dataclass
class WithLossScale(PrecisionConfig):
    """Of a format so narrow that small gradients are lost unless the loss is scaled up."""

    loss_scale: float = option(0.0, "fp16: fixed loss scale; 0 adapts it.", minimum=0)
    initial_scale_power: int = option(
        16,
        "fp16: first adaptive loss scale, as a power of two.",
        minimum=0,
        maximum=32,
        needs=ADAPTIVE,
    )
    loss_scale_window: int = option(
        1000,
        "fp16: steps without overflow before the scale doubles.",
        unit="optimizer steps",
        minimum=1,
        needs=ADAPTIVE,
    )
    hysteresis: int = option(
        2,
        "fp16: overflows until the scale halves; later ones halve it at once, until it doubles.",
        unit="overflows",
        minimum=1,
        needs=ADAPTIVE,
    )
    min_loss_scale: int = option(
        1,
        "fp16: smallest adaptive scale; an overflow at it ends the run.",
        minimum=1,
        needs=ADAPTIVE,
    )


@dataclass(frozen=True, kw_only=True)
class Precision(Spec):
    """A number format to compute in.

    `build`, where there is one, changes a model of that format: a rank calls it with the model and
    the section.
    """

    format: DataType
    """That of activations, and of the weights unless autocast converts them."""
    ability: str = ""
    """What a device must have: the name of its fact; empty where all can."""
    instead: tuple[str, ...] = ()
    """Formats for a device that has not, or on which it is refused; the best first."""
    emulated_by: str = ""
    """The key with which a device without it computes all the same, slowly."""
    not_on_cpu_because: str = ""
    """Why it does not train on a CPU; empty if it does."""
    on_cpu: str = ""
    """What is to be said of it there."""
    can_autocast: bool = False
    """Whether autocast may convert fp32 weights to it."""
    product_bytes: int | None = None
    """Bytes of an element of what the products of blocks convert their factors to; None multiplies
    them as they are."""
    multiple: int = 1
    """What every dimension of such a product is a multiple of."""

    def runs_on(self, device: object) -> bool:
        """Whether a device, or hardware of such devices, computes in it."""
        return not self.ability or bool(getattr(device, self.ability))

    def alternatives(self, device: object) -> tuple[str, ...]:
        """Formats for a device that does not compute in this one."""
        return tuple(name for name in self.instead if load("precision", name).runs_on(device))


def precision_of(section: PrecisionConfig) -> Precision:
    """Of the format that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("precision", section.compute)
    assert isinstance(spec, Precision)
    return spec


def is_emulated(section: PrecisionConfig) -> bool:
    """Whether products only round to the format, and multiply in fp32."""
    key = precision_of(section).emulated_by
    return bool(key and getattr(section, key))


def loss_scaling(config: RunConfig) -> WithLossScale | None:
    """What a configuration says of its loss scale; None where the loss is not scaled."""
    section = config.precision
    return section if isinstance(section, WithLossScale) else None
