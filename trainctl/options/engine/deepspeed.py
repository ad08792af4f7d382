"""DeepSpeed; its settings are DeepSpeed's JSON, `RunPlan.deepspeed`."""

from __future__ import annotations

from trainctl.options.engine import EngineSpec
from trainctl.options.optimizer import Maker

SPEC = EngineSpec(
    name="deepspeed",
    build="trainctl.engines.deepspeed.entry:DeepSpeedBackend",
    settings="trainctl.plans.deepspeed:derived_settings",
    takes_json=True,
    makers=tuple(Maker),
)
