"""Specification of a compute format: the devices it runs on, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec, load_spec, spec_lookup
from trainctl.config.schema import DataType, PrecisionConfig, RunConfig
from trainctl.config.schema.option import option

ADAPTIVE = (
    lambda section: section.loss_scale == 0,
    "precision.compute=fp16 with an adaptive loss scale",
)


@dataclass
class WithLossScale(PrecisionConfig):
    """Keys of a format with so narrow a range that small gradients vanish unless the loss is
    scaled up.
    """

    loss_scale: float = option(
        0.0, "fp16: static loss scale; 0 uses dynamic loss scaling.", minimum=0
    )
    initial_scale_power: int = option(
        16,
        "fp16: initial dynamic loss scale, as a power of two.",
        minimum=0,
        maximum=32,
        needs=ADAPTIVE,
    )
    loss_scale_window: int = option(
        1000,
        "fp16: steps without overflow after which the scale doubles.",
        unit="optimizer steps",
        minimum=1,
        needs=ADAPTIVE,
    )
    hysteresis: int = option(
        2,
        "fp16: overflows before the scale is halved; later overflows halve it at once, until it "
        "doubles again.",
        unit="overflows",
        minimum=1,
        needs=ADAPTIVE,
    )
    min_loss_scale: int = option(
        1,
        "fp16: minimum dynamic loss scale; an overflow at it ends the run.",
        minimum=1,
        needs=ADAPTIVE,
    )


@dataclass(frozen=True, kw_only=True)
class Precision(Spec):
    """Specification of a compute format.

    `build`, if there is one, changes a model to the format: a rank calls it with the model and the
    section.
    """

    format: DataType
    """Format of activations, and of the weights unless autocast converts them."""
    ability: str = ""
    """Name of the device property that the format needs; empty if all devices support it."""
    instead: tuple[str, ...] = ()
    """Formats to propose for a device that does not support or allow this one; the best first."""
    emulated_by: str = ""
    """Key that makes a device without support emulate the format, slowly."""
    not_on_cpu_because: str = ""
    """Reason why it does not train on a CPU; empty if it does."""
    on_cpu: str = ""
    """Remark on training on a CPU."""
    can_autocast: bool = False
    """Whether autocast may convert fp32 weights to it."""
    product_bytes: int | None = None
    """Bytes per element of the format to which matrix products of blocks convert their factors;
    None if they do not convert them.
    """
    multiple: int = 1
    """Number that must divide every dimension of such a product."""

    def runs_on(self, device: object) -> bool:
        """Return True if a device, or hardware with such devices, supports the format."""
        return not self.ability or bool(getattr(device, self.ability))

    def alternatives(self, device: object) -> tuple[str, ...]:
        """Return formats to propose for a device that does not support this one."""
        return tuple(name for name in self.instead if load_spec("precision", name).runs_on(device))


precision_of = spec_lookup(PrecisionConfig, Precision)
"""Return the specification of the configured compute format."""


def is_emulated(section: PrecisionConfig) -> bool:
    """Return True if products only round to the format, and multiply in fp32."""
    key = precision_of(section).emulated_by
    return bool(key and getattr(section, key))


def loss_scaling(config: RunConfig) -> WithLossScale | None:
    """Return the loss scale section of a configuration; None if the loss is not scaled."""
    section = config.precision
    return section if isinstance(section, WithLossScale) else None
