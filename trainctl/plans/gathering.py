"""Units that ZeRO 3 gathers and releases together: decoder blocks, or each of their modules.

DeepSpeed's hooks run Python before and behind each unit that they gather, forward and backward. A
decoder block as one unit has a tenth of these hooks. While it runs, the next block is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import CompileKind, GatherUnit, OffloadDevice, RunConfig
from trainctl.options.engine import engine_of
from trainctl.plans import shapes

KEY = "zero_stage.gather"


def is_gathered_by_trainctl(config: RunConfig) -> bool:
    """Return True if `zero_stage.gather` has an effect: trainctl sets DeepSpeed's units at ZeRO
    3.
    """
    return config.zero_stage.stage == 3 and config.trains_itself and engine_of(config).takes_json


def block_conflict(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that rules out gathering by block, and the reason; None if none does."""
    if config.offload.parameters is OffloadDevice.nvme:
        return (
            "offload.parameters=nvme",
            "DeepSpeed reads the parameters of a module at a time into its swap buffers",
        )
    if config.kernels.compile is CompileKind.deepcompile:
        return "kernels.compile=deepcompile", "the compiled graph gathers each parameter itself"
    return None


def gather_unit(config: RunConfig) -> tuple[GatherUnit, str]:
    """Return the unit that is gathered at ZeRO 3, and the reason."""
    chosen, conflict = config.zero_stage.gather, block_conflict(config)
    if not is_gathered_by_trainctl(config):
        return GatherUnit.modules, "DeepSpeed's default"
    if chosen is not None:
        return chosen, KEY
    if conflict is not None:
        return GatherUnit.modules, ": ".join(conflict)
    limit, both = config.zero_stage.max_live_parameters, 2 * block_elements(config)
    if both > limit:
        why = f"two blocks, {both:_} elements, exceed zero_stage.max_live_parameters {limit:_}"
        return GatherUnit.modules, why
    return GatherUnit.blocks, "each block in one go: a tenth of the hooks of its modules"


def gathers_blocks(config: RunConfig) -> bool:
    """Return True if ZeRO 3 gathers and releases each decoder block as a whole."""
    return gather_unit(config)[0] is GatherUnit.blocks


def gather_reasons(config: RunConfig) -> Iterator[DerivedValue]:
    """Yield the gathered unit with its reason, if the config leaves it open."""
    if is_gathered_by_trainctl(config) and config.zero_stage.gather is None:
        unit, why = gather_unit(config)
        sources = ["zero_stage.max_live_parameters"] if unit is GatherUnit.modules else []
        if conflict := block_conflict(config):
            sources = [conflict[0].partition("=")[0]]
        yield derived(KEY, unit.value, *sources, why=why)


def prefetched_elements(config: RunConfig) -> int:
    """Return the number of elements that are gathered ahead each time that a unit is: by block, at
    least the next block. 0 gathers nothing ahead.
    """
    asked = config.zero_stage.prefetch_bucket_size
    return max(asked, block_elements(config)) if asked and gathers_blocks(config) else asked


def block_elements(config: RunConfig) -> int:
    """Return the number of elements of the largest decoder block on one rank, before ZeRO; 0 for a
    model that has not been read.
    """
    model, axes = config.model, config.parallelism
    if model.is_unread:
        return 0
    read, block = shapes.anatomy(model), shapes.count_parameters(model).block
    experts = 0 if read is None else read.expert_parameters // max(len(read.blocks), 1)
    return (block - experts + experts // axes.expert) // axes.tensor
