"""No adapter: the model's own weights are trained."""

from __future__ import annotations

from trainctl.config.schema import AdapterConfig
from trainctl.options.adapter import Adapter

SPEC = Adapter(name="none", keys=AdapterConfig)
