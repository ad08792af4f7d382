"""Facts about machines and devices: declared by a `hardware` option, or detected here."""

from trainctl.hardware.detect import Hardware
from trainctl.hardware.resolve import resolve_hardware

__all__ = ["Hardware", "resolve_hardware"]
