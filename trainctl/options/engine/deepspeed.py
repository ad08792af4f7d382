"""DeepSpeed; its settings are `RunPlan.deepspeed`."""

from __future__ import annotations

from trainctl.options.engine import EngineSpec

SPEC = EngineSpec(name="deepspeed", build="trainctl.engines.deepspeed.room:DeepSpeedRoom")
