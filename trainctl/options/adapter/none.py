"""The weights of the model itself train."""

from __future__ import annotations

from trainctl.config.schema import AdapterConfig
from trainctl.options.adapter import Adapter

SPEC = Adapter(name="none", keys=AdapterConfig)
