"""DeepSpeed; its settings are DeepSpeed's JSON, `RunPlan.deepspeed`."""

from __future__ import annotations

from trainctl.options.engine import EngineSpec
from trainctl.options.limits import only_value
from trainctl.options.optimizer import Maker

SPEC = EngineSpec(
    name="deepspeed",
    build="trainctl.engines.deepspeed.entry:DeepSpeedBackend",
    settings="trainctl.plans.deepspeed:derived_settings",
    takes_json=True,
    makers=tuple(Maker),
    limits=(
        only_value(
            "zero_stage.shard_group_size",
            None,
            "partitions over all data-parallel ranks: DeepSpeed 0.19 has removed MiCS",
            "engine=fsdp2, or at zero_stage=3 hpz_partition_size=N, which gathers within N devices "
            "for the backward pass",
        ),
    ),
)
