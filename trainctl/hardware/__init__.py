"""Facts about machines and devices: declared by a `hardware` option, or detected here."""

from trainctl.hardware.facts import Hardware
from trainctl.hardware.packages import missing_packages
from trainctl.hardware.preflight import preflight
from trainctl.hardware.resolve import resolve_hardware

__all__ = ["Hardware", "missing_packages", "preflight", "resolve_hardware"]
