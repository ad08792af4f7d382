"""Search space: layouts, batches, recomputation and losses, each variant timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import floor, inf, log
from typing import Any, NamedTuple

from trainctl.config.keys import as_written
from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    KernelsConfig,
    OffloadDevice,
    RunConfig,
)
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware
from trainctl.options.activation_checkpointing import (
    kinds_by_saved_activations,
    recomputing_section,
)
from trainctl.options.adapter import low_rank
from trainctl.options.engine import engine_of
from trainctl.options.launcher import launcher_for
from trainctl.plans import shapes
from trainctl.plans.derive import blocks_of_stages, divisors
from trainctl.plans.trainable import is_partial
from trainctl.plans.types import Mesh
from trainctl.rules.kernel_choice import with_kernels
from trainctl.rules.plan.draft import Draft
from trainctl.rules.plan.experts import LIMITS as EXPERT_LIMITS
from trainctl.rules.plan.layout import (
    attention_sees_the_whole_sequence,
    parallelism_knows_the_architecture,
    ring_drops_nothing,
    ring_has_a_kernel,
)
from trainctl.rules.plan.model import module_can_do_what_is_asked
from trainctl.rules.plan.optimizer import (
    future_blocks_go_with_the_rest,
    objective_goes_with_the_rest,
)
from trainctl.rules.plan.trainable import frozen_weights_go_with_the_rest
from trainctl.tuning.rates import expert_weights
from trainctl.tuning.speed import TimedVariant, Values, time_variant, with_values

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batch sizes to try; larger ones gain nothing: products of thousands of tokens are
already at full rate.
"""
MOST_ROUNDED = 0.10
"""Maximum relative deviation of a layout from the wanted tokens per step."""
RESOLUTION = 0.01
"""Relative difference in time below which the simpler layout comes first."""


BATCH_KEYS = frozenset(
    {
        "training.micro_batch_size",
        "training.gradient_accumulation_steps",
        "training.global_batch_size",
    }
)

VARIANT_KEYS = BATCH_KEYS | frozenset(
    {
        "activation_checkpointing.mode",
        "activation_checkpointing.offload_to_cpu",
        "activation_checkpointing.partition_across_tensor_ranks",
        "kernels.cross_entropy",
        "zero_stage.overlap_comm",
        "zero_stage.shard_group_size",
        "zero_stage.hpz_partition_size",
    }
)
"""Keys in which the variants of a layout differ."""


EARLY_RULES = (
    attention_sees_the_whole_sequence,
    parallelism_knows_the_architecture,
    ring_has_a_kernel,
    ring_drops_nothing,
    module_can_do_what_is_asked,
    objective_goes_with_the_rest,
    future_blocks_go_with_the_rest,
    frozen_weights_go_with_the_rest,
)
"""Rules whose refusal of an axis, an offload or a loss holds for any size and layout."""

RING_CHUNK = 4096
"""Fewest tokens of a chunk for which context ranks are tried. Keys of 4,096 arrive within the
attention to those before at 31 GB/s, which a network of 400 Gb/s has
(scripts/benchmarks/ring_kernels.py on an H100).
"""


AXES = ("tensor", "pipeline", "sequence", "expert", "context")
"""Searched keys of `parallelism`."""


class ShownLayout(NamedTuple):
    """Values that distinguish the shown plans: one is shown per layout."""

    mesh: Mesh
    stage: int
    """ZeRO stage."""
    offloads_optimizer: bool
    offloads_parameters: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """Timed variant in the queue of the search."""

    values: dict[str, Any]
    layout: ShownLayout
    retained: tuple[int, ...]
    """Ranks of recomputation, loss, shard groups and overlap by the device memory they take, larger
    for more.
    """
    variant: TimedVariant

    @property
    def size(self) -> tuple[int, int]:
        """Sort key by memory: within a layout, the smallest candidate certainly needs the least."""
        return self.variant.sketch.batch.micro_batch_size, sum(self.retained)

    @property
    def order(self) -> tuple[int, int, float]:
        """Sort key by time, then by simplicity."""
        time = self.variant.seconds_per_token
        mesh, stage, offloads, _ = self.layout
        # Simpler means fewer mesh axes, a lower ZeRO stage, less offload, no groups or overlap.
        effort = 8 * sum(getattr(mesh, axis) > 1 for axis in AXES) + 2 * stage + 16 * offloads
        effort += sum(self.retained[-2:])
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
    if training.steps is None and training.tokens is None:
        return {"training.steps": 1, "training.epochs": None}
    return {}


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
        self._kernels: dict[tuple[tuple[str, str], ...], KernelsConfig] = {}
        self._sections: dict[str, Any] = {}

    def is_fixed(self, key: str) -> bool:
        """Return True if the user has set the key or its group."""
        return key in self.fixed or key.partition(".")[0] in self.fixed

    def candidates(self, offloads: list[Values]) -> Iterator[Candidate]:
        """Yield every variant that simple arithmetic allows, timed."""
        for mesh, stage, offload in product(self._meshes(), self._stages(), offloads):
            layout = ShownLayout(mesh, stage, *self._offload_of(offload))
            fixed = {
                **self._launcher(),
                **self._axis_values(mesh),
                "zero_stage.stage": stage,
                **offload,
            }
            if not self._may_be_legal(layout, fixed):
                continue
            needs = self._state_bytes(layout)
            if needs > (self.hardware.device_memory_bytes or inf):
                self.left_out.least_bytes = min(needs, self.left_out.least_bytes)
                continue
            blocks = self._blocks(mesh)
            for micro, accumulation in self._batches(mesh.data, mesh.sequence_parts):
                for kept, chosen in self._retained(layout):
                    values = {**fixed, "training.micro_batch_size": micro, **chosen}
                    if self.exactly:
                        values["training.gradient_accumulation_steps"] = accumulation
                    elif not self.is_fixed("training.gradient_accumulation_steps"):
                        # Derived from the batch.
                        values["training.gradient_accumulation_steps"] = None
                    changed = self._with_kernels(values)
                    variant = time_variant(changed, self.hardware, blocks)
                    if variant is not None:
                        yield Candidate(values, layout, kept, variant)

    def _with_kernels(self, values: Values) -> RunConfig:
        """Return the configuration with the values, and with kernels that go with them. They depend
        on no batch, so that few combinations are asked for.
        """
        config = with_values(self.base, values, self._sections)
        key = tuple((name, as_written(values[name])) for name in values if name not in BATCH_KEYS)
        if key not in self._kernels:
            self._kernels[key] = with_kernels(config, self.hardware).kernels
        return replace(config, kernels=self._kernels[key])

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
        values = [[dict(zip(keys, pair, strict=True)) for pair in pairs] for pairs in rounds]
        return [[each for each in part if not self._is_refused("offload", each)] for part in values]

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

    def _batches(self, data: int, parts: int) -> Iterator[tuple[int, int]]:
        """Yield micro-batch sizes and accumulation steps that give (nearly) the global batch.

        Sequences in several `parts` are too long for one rank, so ranks take one at a time: with
        several, fewer sequences per rank do the same with less communication.
        """
        own_micro = self._fixed_size("micro_batch_size")
        own_accumulation = self._fixed_size("gradient_accumulation_steps")
        share = self.sequences / data
        if own_micro is not None:
            sizes = [own_micro]
        elif own_accumulation is not None:
            sizes = [max(1, floor(share / own_accumulation + 0.5))]
        else:
            most = 1 if parts > 1 else max(1, share * (1 + MOST_ROUNDED))
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

    def _meshes(self) -> Iterator[Mesh]:
        """Yield the meshes whose axes divide the devices, and the experts of a sparse model."""
        parallelism, world = self.config.parallelism, self.hardware.world_size
        chunks = self.config.training.sequence_length // (2 * RING_CHUNK)
        most = {
            "tensor": self.hardware.devices_per_node,
            "expert": self._most_expert_ranks(),
            "context": max(1, chunks),
        }
        options = []
        for name in AXES:
            if self.is_fixed(f"parallelism.{name}"):
                options.append([getattr(parallelism, name)])
            else:
                is_refused = self._is_refused("parallelism", {f"parallelism.{name}": 2})
                largest = 1 if is_refused else most.get(name, world)
                options.append([size for size in divisors(world) if size <= largest])
        for sizes in product(*options):
            mesh = Mesh(data=1, **dict(zip(AXES, sizes, strict=True)))
            data, left_over = divmod(world, mesh.world_size)
            if left_over or data % mesh.expert:
                continue
            if self.is_fixed("parallelism.data") and parallelism.data not in (None, data):
                continue
            yield replace(mesh, data=data)

    def _is_refused(self, section: str, values: Values) -> bool:
        """Return True if `EARLY_RULES` refuse values of a section on any layout."""
        axes = {f"parallelism.{name}": 1 for name in AXES}
        draft = Draft(
            config=with_kernels(with_values(self.base, {**axes, **values}), self.hardware),
            hardware=self.hardware,
            mesh=None,
            batch=None,
            batches=None,
            total_steps=None,
        )
        problems = (problem for rule in EARLY_RULES for problem in rule.problems(draft))
        return any(problem.key.partition(".")[0] == section for problem in problems)

    @cached_property
    def _may_chunk_loss(self) -> bool:
        config = self.config
        if not config.trains_itself or config.kernels.compile is CompileKind.deepcompile:
            return False
        chunked = {"kernels.cross_entropy": CrossEntropyKind.chunked}
        return not self._is_refused("kernels", chunked)

    def _most_expert_ranks(self) -> int:
        """Return the largest size of the expert axis: the number of experts of a layer."""
        model = self.config.model
        return (model.num_experts or 1) if shapes.anatomy(model) is not None else 1

    def _axis_values(self, mesh: Mesh) -> dict[str, Any]:
        values: dict[str, Any] = {f"parallelism.{name}": getattr(mesh, name) for name in AXES}
        if not self.is_fixed("parallelism.data"):
            values["parallelism.data"] = None
        if self.config.parallelism.stage_blocks and not self.is_fixed("parallelism.stage_blocks"):
            values["parallelism.stage_blocks"] = []
        return values

    def _blocks(self, mesh: Mesh) -> tuple[int, ...]:
        config = with_values(self.base, self._axis_values(mesh))
        length = config.training.sequence_length
        return blocks_of_stages(config.model, config.parallelism, sequence_length=length)

    def _stages(self) -> tuple[int, ...]:
        fixed = self.is_fixed("zero_stage.stage")
        return (self.config.zero_stage.stage,) if fixed else (0, 1, 2, 3)

    def _retained(self, layout: ShownLayout) -> Iterator[tuple[tuple[int, ...], Values]]:
        """Yield the choices that trade memory for speed, each with the memory rank of its parts."""
        mesh, stage, *_ = layout
        for parts in product(
            self._modes(mesh.tensor),
            self._losses(mesh),
            self._shard_groups(layout),
            self._overlaps(mesh, stage),
        ):
            yield (
                tuple(rank for rank, _ in parts),
                {key: value for _, values in parts for key, value in values.items()},
            )

    def _shard_groups(self, layout: ShownLayout) -> list[tuple[int, Values]]:
        """Return the shard groups worth trying on several nodes, with their memory ranks: none, and
        nodes. With DeepSpeed, hpZ gathers within a node for the backward pass.
        """
        is_json = engine_of(self.config).takes_json
        key = f"zero_stage.{'hpz_partition_size' if is_json else 'shard_group_size'}"
        node, nodes = self.hardware.devices_per_node, self.hardware.nodes
        if self.is_fixed(key) or nodes == 1 or node == 1:
            return [(0, {})]
        whole = (0, {key: 1 if is_json else None})
        if is_json:
            is_whole = layout.mesh.tensor == layout.mesh.expert == 1
            moves = layout.offloads_parameters or is_partial(self.config)
            legal = layout.stage == 3 and is_whole and not moves
            return [whole, (1, {key: node})] if legal else [whole]
        sizes = [node * each for each in reversed(divisors(nodes)[:-1])]
        data_only = all(getattr(layout.mesh, axis) == 1 for axis in AXES)
        return [whole, *enumerate(({key: size} for size in sizes), 1)] if data_only else [whole]

    def _overlaps(self, mesh: Mesh, stage: int) -> list[tuple[int, Values]]:
        """Return the values of `overlap_comm` with their memory ranks; it is free at stage 3."""
        key = "zero_stage.overlap_comm"
        if self.is_fixed(key) or not engine_of(self.config).takes_json:
            return [(0, {})]
        on, off = (1, {key: True}), (0, {key: False})
        alone = mesh.world_size == mesh.tensor * mesh.pipeline
        if stage == 0 or mesh.pipeline > 1 or alone:
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

    def _losses(self, mesh: Mesh) -> list[tuple[int, Values]]:
        key = "kernels.cross_entropy"
        own = self._with_kernels(self._axis_values(mesh)).kernels.cross_entropy
        if self.is_fixed(key) or own is CrossEntropyKind.liger_fused:
            return [(0, {})]
        is_open = self.config.kernels.cross_entropy is None
        plain: tuple[int, Values] = (1, {} if is_open else {key: CrossEntropyKind.plain})
        if mesh.pipeline > 1 or not self._may_chunk_loss:
            return [plain]
        return [(0, {key: CrossEntropyKind.chunked}), plain]

    def _offload_of(self, offload: Values) -> tuple[bool, bool]:
        """Return whether the optimizer, and whether the parameters, are offloaded."""
        return tuple(
            offload.get(f"offload.{name}", getattr(self.config.offload, name))
            is not OffloadDevice.none
            for name in ("optimizer", "parameters")
        )  # type: ignore[return-value]

    def _may_be_legal(self, layout: ShownLayout, values: Values) -> bool:
        """Return False if the rules of layouts and ZeRO stages would refuse the combination at
        once. Other rules are checked later.
        """
        model, (mesh, stage, optimizer, parameters) = self.config.model, layout
        tensor, pipeline, sequence = mesh.tensor, mesh.pipeline, mesh.sequence
        if shapes.undivided_units(model, tensor, repeats=self.config.trains_itself):
            return False
        heads, length = model.num_attention_heads // tensor, self.config.training.sequence_length
        config = self._with_kernels(values)
        if heads % sequence or length % config.parallelism.sequence_multiple:
            return False
        is_shared = mesh.sequence_parts > 1
        stages = config.parallelism.stages
        if stages > max(1, model.num_layers) or (pipeline > 1 and (stage > 1 or is_shared)):
            return False
        if (optimizer and stage == 0) or (parameters and stage < 3):
            return False
        if mesh.expert == 1:
            return True
        are_met = all(limit.holds(config) for limit in EXPERT_LIMITS)
        return (model.num_experts or 1) % (mesh.expert * tensor) == 0 and are_met

    def _state_bytes(self, layout: ShownLayout) -> float:
        """Return a lower bound of the device bytes of 16-bit weights, or 4-bit ones under an
        adapter, and fp32 master weights.

        Every configuration needs more, so that nothing that fits is left out.
        """
        mesh, stage, optimizer, parameters = layout
        experts = expert_weights(self.config.model)
        dense = shapes.count_parameters(self.config.model).blocks - experts
        elements = (dense + experts / mesh.expert) / (mesh.tensor * mesh.pipeline)
        partitioned = (dense + experts) / mesh.world_size
        adapter = low_rank(self.config.adapter)
        width = 0.5 if adapter is not None and adapter.is_quantized else 2
        weights = 0.0 if parameters else width * (partitioned if stage == 3 else elements)
        without = optimizer or is_partial(self.config)
        states = 0.0 if without else 4 * (partitioned if stage else elements)
        return weights + states
