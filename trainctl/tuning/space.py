"""Search space: layouts, batches, recomputation and losses, each variant timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import floor, inf, log
from typing import Any

from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware
from trainctl.options.activation_checkpointing import (
    kinds_by_saved_activations,
    recomputing_section,
)
from trainctl.options.engine import engine_of
from trainctl.options.launcher import launcher_for
from trainctl.plans import shapes
from trainctl.plans.derive import blocks_of_stages, divisors
from trainctl.plans.trainable import is_partial
from trainctl.tuning.speed import TimedVariant, Values, time_variant, with_values

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batch sizes to try; larger ones gain nothing: products of thousands of tokens are
already at full rate.
"""
MOST_ROUNDED = 0.10
"""Maximum relative deviation of a layout from the wanted tokens per step."""
RESOLUTION = 0.01
"""Relative difference in time below which the simpler layout comes first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """TimedVariant variant in the queue of the search."""

    values: dict[str, Any]
    layout: tuple[Any, ...]
    """Tensor, pipeline and sequence sizes, ZeRO stage, and offload of optimizer and parameters; one
    plan is shown per layout.
    """
    retained: tuple[int, ...]
    """Ranks of recomputation, loss and overlap by the device memory they take, larger for more."""
    variant: TimedVariant

    @property
    def size(self) -> tuple[int, int]:
        """Sort key by memory: within a layout, the smallest candidate certainly needs the least."""
        return self.variant.sketch.batch.micro_batch_size, sum(self.retained)

    @property
    def order(self) -> tuple[int, int, float]:
        """Sort key by time, then by simplicity."""
        time = self.variant.seconds_per_token
        axes = self.layout[:3]
        # Simpler means fewer mesh axes, a lower ZeRO stage, less offload, no overlap.
        effort = 8 * sum(size > 1 for size in axes) + 2 * self.layout[3] + 16 * self.layout[4]
        effort += self.retained[-1]
        return floor(log(time) / RESOLUTION) if time > 0 else 0, effort, time


@dataclass(slots=True)
class LeftOutLayouts:
    """Legal layouts without any timed candidate."""

    shares: set[int] = field(default_factory=set)
    """Sizes, in sequences, of which the global batch would have to be a multiple for these
    layouts.
    """
    least_bytes: float = inf
    """Smallest bytes of weights and optimizer states among the layouts that exceed a device by
    these alone; infinite without such a layout.
    """


def placeholder_length(config: RunConfig) -> Values:
    """Return a placeholder length if none is configured: a plan needs one, its speed does not."""
    training = config.training
    return {"training.steps": 1} if training.steps is None and training.tokens is None else {}


class Space:
    """Variants of a configuration that the search may choose from.

    `base` is the configuration with a length, and with a launcher that can start its machines.
    `sequences` is the wanted number per step, whole if `exactly`: then the global batch is met
    exactly, otherwise within `MOST_ROUNDED`. `left_out` collects the layouts that `candidates` has
    skipped so far.
    """

    def __init__(self, config: RunConfig, hardware: Hardware, fixed: frozenset[str]) -> None:
        self.config, self.hardware, self.fixed = config, hardware, fixed
        self.base = with_values(config, {**placeholder_length(config), **self._launcher()})
        self.sequences = self._global_batch()
        self.exactly = config.training.global_batch_size is not None
        self.left_out = LeftOutLayouts()

    def is_fixed(self, key: str) -> bool:
        """Return True if the user has set the key or its group."""
        return key in self.fixed or key.partition(".")[0] in self.fixed

    def candidates(self, offloads: list[Values]) -> Iterator[Candidate]:
        """Yield every variant that simple arithmetic allows, timed."""
        for axes, stage, offload in product(self._meshes(), self._stages(), offloads):
            tensor, pipeline, sequence = axes
            optimizer, parameters = self._offload_of(offload)
            if not self._may_be_legal(axes, stage, optimizer, parameters):
                continue
            layout = (tensor, pipeline, sequence, stage, optimizer, parameters)
            fixed = {
                **self._launcher(),
                **self._axis_values(axes),
                "zero_stage.stage": stage,
                **offload,
            }
            needs = self._state_bytes(axes, stage, optimizer, parameters)
            if needs > (self.hardware.device_memory_bytes or inf):
                self.left_out.least_bytes = min(needs, self.left_out.least_bytes)
                continue
            data = self.hardware.world_size // (tensor * pipeline * sequence)
            blocks = self._blocks(axes)
            for micro, accumulation in self._batches(data, sequence):
                for kept, chosen in self._retained(axes, stage):
                    values = {**fixed, "training.micro_batch_size": micro, **chosen}
                    if self.exactly:
                        values["training.gradient_accumulation_steps"] = accumulation
                    elif not self.is_fixed("training.gradient_accumulation_steps"):
                        # Derived from the batch.
                        values["training.gradient_accumulation_steps"] = None
                    changed = with_values(self.base, values)
                    variant = time_variant(changed, self.hardware, blocks)
                    if variant is not None:
                        yield Candidate(values, layout, kept, variant)

    @cached_property
    def offloads(self) -> list[list[Values]]:
        """Rounds of `offload` values, in the order in which they are worth trying."""
        if self.is_fixed("offload.optimizer") or self.is_fixed("offload.parameters"):
            return [[{}]]
        keys = ("offload.optimizer", "offload.parameters")
        none, cpu, nvme = OffloadDevice.none, OffloadDevice.cpu, OffloadDevice.nvme
        rounds = [[(none, none)]]
        if self.hardware.accelerator is not Accelerator.cpu:
            rounds.append([(cpu, none), (cpu, cpu)])
            if self.config.offload.nvme_path is not None:
                rounds.append([(nvme, none), (nvme, nvme)])
        return [[dict(zip(keys, pair, strict=True)) for pair in pairs] for pairs in rounds]

    def _launcher(self) -> Values:
        """Return the launcher keys to change: not every launcher starts several machines."""
        if self.is_fixed("launcher.kind"):
            return {}
        return launcher_for(self.config.launcher, self.hardware.nodes)

    def _global_batch(self) -> float:
        """Return the wanted number of sequences per step."""
        training = self.config.training
        if training.global_batch_size is not None:
            return training.global_batch_size
        if training.global_batch_tokens is not None:
            return training.global_batch_tokens / training.sequence_length
        raise TrainctlError(
            "training.global_batch_tokens: how many tokens a step takes is not a question of "
            "speed, and nothing says it",
            hint="training.global_batch_tokens=4M, or training.global_batch_size=512",
        )

    def _batches(self, data: int, sequence: int) -> Iterator[tuple[int, int]]:
        """Yield micro-batch sizes and accumulation steps that give (nearly) the global batch.

        Sequence parallelism is for sequences that are too long for one rank, so it is combined with
        one sequence at a time: with several, fewer sequences per rank do the same with less
        communication.
        """
        own_micro = self._fixed_size("micro_batch_size")
        own_accumulation = self._fixed_size("gradient_accumulation_steps")
        share = self.sequences / data
        if own_micro is not None:
            sizes = [own_micro]
        elif own_accumulation is not None:
            sizes = [max(1, floor(share / own_accumulation + 0.5))]
        else:
            most = 1 if sequence > 1 else max(1, share * (1 + MOST_ROUNDED))
            sizes = [size for size in MICRO_BATCHES if size <= most]
        is_shared = False
        for micro in sizes:
            each = micro * data
            accumulation = max(1, floor(self.sequences / each + 0.5))
            off = abs(accumulation * each / self.sequences - 1)
            if off > (0 if self.exactly else MOST_ROUNDED):
                continue
            if own_accumulation not in (None, accumulation):
                continue
            is_shared = True
            ramp = self.config.training.batch_ramp
            if not any(entry.get("global_batch_size", 0) % each for entry in ramp):
                yield micro, accumulation
        if not is_shared:
            self.left_out.shares.add(data * (own_micro or 1) * (own_accumulation or 1))

    def _fixed_size(self, name: str) -> int | None:
        """Return a batch size that the user has set; None otherwise."""
        size: int | None = getattr(self.config.training, name)
        return size if self.is_fixed(f"training.{name}") else None

    def _meshes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the sizes of the tensor, pipeline and sequence axes that divide the devices."""
        axes, world = self.config.parallelism, self.hardware.world_size
        node = self.hardware.devices_per_node
        options = []
        for name, most in (("tensor", node), ("pipeline", world), ("sequence", world)):
            if self.is_fixed(f"parallelism.{name}"):
                options.append([getattr(axes, name)])
            else:
                options.append([size for size in divisors(world) if size <= most])
        for tensor, pipeline, sequence in product(*options):
            model_parallel = tensor * pipeline * sequence
            if world % model_parallel:
                continue
            if self.is_fixed("parallelism.data") and axes.data not in (
                None,
                world // model_parallel,
            ):
                continue
            yield tensor, pipeline, sequence

    def _axis_values(self, axes: tuple[int, int, int]) -> dict[str, Any]:
        names = ("tensor", "pipeline", "sequence")
        values: dict[str, Any] = {
            f"parallelism.{name}": size for name, size in zip(names, axes, strict=True)
        }
        if not self.is_fixed("parallelism.data"):
            values["parallelism.data"] = None
        if self.config.parallelism.stage_blocks and not self.is_fixed("parallelism.stage_blocks"):
            values["parallelism.stage_blocks"] = []
        return values

    def _blocks(self, axes: tuple[int, int, int]) -> tuple[int, ...]:
        config = with_values(self.base, self._axis_values(axes))
        length = config.training.sequence_length
        return blocks_of_stages(config.model, config.parallelism, sequence_length=length)

    def _stages(self) -> tuple[int, ...]:
        fixed = self.is_fixed("zero_stage.stage")
        return (self.config.zero_stage.stage,) if fixed else (0, 1, 2, 3)

    def _retained(
        self, axes: tuple[int, int, int], stage: int
    ) -> Iterator[tuple[tuple[int, ...], Values]]:
        """Yield the choices that trade memory for speed, each with the memory rank of its parts."""
        for parts in product(self._modes(axes[0]), self._losses(axes), self._overlaps(axes, stage)):
            yield (
                tuple(rank for rank, _ in parts),
                {key: value for _, values in parts for key, value in values.items()},
            )

    def _overlaps(self, axes: tuple[int, int, int], stage: int) -> list[tuple[int, Values]]:
        """Return the values of `overlap_comm` with their memory ranks; it is free at stage 3."""
        key = "zero_stage.overlap_comm"
        if self.is_fixed(key) or not engine_of(self.config).takes_json:
            return [(0, {})]
        on, off = (1, {key: True}), (0, {key: False})
        alone = self.hardware.world_size == axes[0] * axes[1]
        if stage == 0 or axes[1] > 1 or alone:
            return [off]
        return [on] if stage == 3 else [off, on]

    def _modes(self, tensor: int) -> list[tuple[int, Values]]:
        """Return the kinds of recomputation with their memory ranks."""
        section = "activation_checkpointing"
        settings = recomputing_section(self.config)
        key, away = f"{section}.mode", f"{section}.offload_to_cpu"
        slices = f"{section}.partition_across_tensor_ranks"
        if self.is_fixed(key) or self.is_fixed(f"{section}.every_kth_block"):
            return [(0, {})]
        kinds: list[Values] = [
            {key: kind.name, away: False} if kind.recomputes else {key: kind.name}
            for kind in kinds_by_saved_activations()
        ]
        modes = [*enumerate([{**kinds[0], away: True}, *kinds])]
        if self.hardware.accelerator is Accelerator.cpu:
            modes = modes[1:]
        if self.is_fixed(away):
            asked = settings is not None and settings.offload_to_cpu
            modes = [mode for mode in modes if mode[1].get(away, False) == asked]
        if settings is None or not settings.partition_across_tensor_ranks:
            return modes
        # Only modes with recomputed blocks can slice the inputs of these blocks.
        sliced = [mode for mode in modes if tensor > 1 and away in mode[1]]
        if self.is_fixed(slices):
            return sliced
        whole = [mode for mode in modes if mode not in sliced]
        unsliced = ((n, {**mode, slices: False} if away in mode else mode) for n, mode in whole)
        return [*sliced, *unsliced]

    def _losses(self, axes: tuple[int, int, int]) -> list[tuple[int, Values]]:
        key = "kernels.cross_entropy"
        if self.is_fixed(key) or self.config.kernels.cross_entropy is CrossEntropyKind.liger_fused:
            return [(0, {})]
        plain = (1, {key: CrossEntropyKind.plain})
        if axes[1] > 1 or self.config.kernels.compile is CompileKind.deepcompile:
            return [plain]
        return [(0, {key: CrossEntropyKind.chunked}), plain]

    def _offload_of(self, offload: Values) -> tuple[bool, bool]:
        """Return whether the optimizer, and whether the parameters, are offloaded."""
        return tuple(
            offload.get(f"offload.{name}", getattr(self.config.offload, name))
            is not OffloadDevice.none
            for name in ("optimizer", "parameters")
        )  # type: ignore[return-value]

    def _may_be_legal(
        self, axes: tuple[int, int, int], stage: int, optimizer: bool, parameters: bool
    ) -> bool:
        """Return False if the rules of layouts and ZeRO stages would refuse the combination at
        once. Other rules are checked later.
        """
        model = self.config.model
        tensor, pipeline, sequence = axes
        if any(count % tensor for count in shapes.tensor_units(model).values()):
            return False
        heads, length = model.num_attention_heads // tensor, self.config.training.sequence_length
        if heads % sequence or length % sequence:
            return False
        if pipeline > max(1, model.num_layers) or (pipeline > 1 and (stage > 1 or sequence > 1)):
            return False
        return not ((optimizer and stage == 0) or (parameters and stage < 3))

    def _state_bytes(
        self, axes: tuple[int, int, int], stage: int, optimizer: bool, parameters: bool
    ) -> float:
        """Return a lower bound of the device bytes of 16-bit weights and fp32 master weights.

        Every configuration needs more, so that nothing that fits is left out.
        """
        tensor, pipeline, _ = axes
        count = shapes.count_parameters(self.config.model)
        elements = count.blocks / (tensor * pipeline)
        ranks = self.hardware.world_size // (tensor * pipeline)
        weights = 0.0 if parameters else 2 * elements / (ranks if stage == 3 else 1)
        without = optimizer or is_partial(self.config)
        states = 0.0 if without else 4 * elements / (ranks if stage else 1)
        return weights + states
