"""Memory-relevant view of a plan's engine: element sizes, modes, and parameter groups.

DeepSpeed keeps a buffer and makes an update for each parameter group, so the peak depends on their
number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from trainctl.config.schema import (
    Accelerator,
    OffloadConfig,
    OffloadDevice,
    OptimizerConfig,
    RunConfig,
    ZeroStageConfig,
)
from trainctl.memory.activations import compute_bytes
from trainctl.memory.constants import BYTES
from trainctl.memory.stages import Piece, Stage
from trainctl.options.model import spec_of as model_of
from trainctl.options.optimizer import FOREACH, KERNEL, PLAIN, Maker, Update, spec_of
from trainctl.plans import optimizers, shapes
from trainctl.plans.optimizers import is_fused, optimizer_maker
from trainctl.plans.settings import number_formats
from trainctl.plans.types import LayoutPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameter group of a pipeline stage, unpartitioned."""

    elements: int
    """Elements of all tensors on this rank after tensor parallelism; with ZeRO, on all ZeRO
    ranks.
    """
    largest: int
    """Elements of the largest tensor."""
    largest_whole: int = 0
    """Elements of the largest tensor on all its tensor ranks together; 0 if none is split."""
    uses_muon: bool = False
    """Whether Muon updates the group."""


def stage_groups(config: RunConfig, stage: Stage) -> tuple[Group, ...]:
    """Return the parameter groups of a stage, in the order of its tensors."""
    found: dict[tuple[optimizers.GroupKey, int], Group] = {}
    pieces = (found for part in stage.parts for found in _pieces_by_group(config, part))
    for piece, count, key in pieces:
        # Experts sharded over the expert axis are separate groups.
        before = found.get((key, piece.spread), Group(elements=0, largest=0))
        numel = piece.numel * (piece.spread if config.zero_stage.stage else 1)
        found[key, piece.spread] = Group(
            elements=before.elements + count * numel,
            largest=max(before.largest, piece.numel),
            largest_whole=max(
                before.largest_whole,
                piece.numel * piece.tensor_ranks if piece.tensor_ranks > 1 else 0,
            ),
            uses_muon=key.uses_muon,
        )
    return tuple(found.values())


def tensors_by_group(config: RunConfig, stage: Stage) -> list[tuple[int, list[int]]]:
    """Return the `spread` of each parameter group of a stage, and the elements of its tensors on
    this rank, in the model's order.
    """
    found: dict[tuple[optimizers.GroupKey, int], list[int]] = {}
    pieces = (each for part in stage.parts for each in _pieces_by_group(config, part))
    for count, alike in groupby(pieces, key=lambda each: each[1]):
        of_block: dict[tuple[optimizers.GroupKey, int], list[int]] = {}
        for piece, _, key in alike:
            of_block.setdefault((key, piece.spread), []).append(piece.numel)
        for group, sizes in of_block.items():
            found.setdefault(group, []).extend(sizes * count)
    return [(spread, sizes) for (_, spread), sizes in found.items()]


def _pieces_by_group(
    config: RunConfig, stage: Stage
) -> Iterator[tuple[Piece, int, optimizers.GroupKey]]:
    """Yield each piece with its number of tensors in a group and the key of the group."""
    optimizer = config.optimizer
    blocks = range(stage.first_block, stage.first_block + max(stage.blocks, 1))
    alike = not optimizer.groups and optimizer.layer_lr_decay == 1
    if alike:
        blocks = blocks[:1]  # all blocks have the same groups
    prefix = shapes.block_prefix(config.model)
    undecayed = shapes.undecayed(config.model)
    known: dict[tuple[int | str, bool, bool], optimizers.GroupKey] = {}
    for piece in stage.pieces:
        shape = (1, 1) if piece.is_matrix else (1,)  # only the number of dimensions matters
        kind = shapes.without_block(piece.name) if alike else piece.name
        names: dict[int | str, str] = {kind: piece.name}
        is_of_each_block = piece.in_block and piece.count == stage.blocks
        if is_of_each_block and shapes.block_of(piece.name) is None:
            names = {block: f"{prefix}.{block}.{piece.name}" for block in blocks}
        for block, name in names.items():
            # Without patterns on names, tensors of a block differ by their kind alone.
            told_by = (name if optimizer.groups else block, piece.is_matrix, name in undecayed)
            if told_by not in known:
                known[told_by] = optimizers.group_of(config, name, shape, embedding=piece.embedding)
            yield piece, piece.count // len(names), known[told_by]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Element sizes in bytes, and the modes that decide which state is where."""

    config: RunConfig
    ranks: int
    """Ranks that ZeRO partitions over: those of data, context and sequence, or an HSDP shard
    group.
    """
    weight_bytes: int
    """Bytes per element of a weight that the model computes with."""
    gradient_bytes: int
    """Bytes per element of an accumulated gradient."""
    communication_bytes: int
    """Bytes per element of a gradient in communication."""
    master_bytes: int
    """Bytes per element of a master weight."""
    moment_bytes: int
    """Bytes per element of an optimizer moment."""
    accumulates: bool
    """Whether gradients accumulate over several micro-batches."""
    update: Update
    """Temporary copies made by an optimizer update."""
    muon_update: Update
    """Temporary copies made by an update of a parameter group that uses Muon."""
    memory_efficient_linear: bool
    """Whether DeepSpeed's linear layer releases gathered weights at stage 3."""
    autocast: bool
    """Whether weights are fp32 and are cast for each product."""
    on_cpu: bool
    """Whether the accelerator is the CPU, so that device memory is host memory."""
    factors: bool = False
    """Whether adafactor's second moment is factored into rows and columns."""

    @property
    def zero(self) -> ZeroStageConfig:
        return self.config.zero_stage

    @property
    def offload(self) -> OffloadConfig:
        return self.config.offload

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.config.optimizer

    @property
    def stage(self) -> int:
        return self.zero.stage

    @property
    def offloads_optimizer(self) -> bool:
        return self.stage > 0 and self.offload.optimizer is not OffloadDevice.none

    @property
    def offloads_parameters(self) -> bool:
        return self.stage == 3 and self.offload.parameters is not OffloadDevice.none

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed runs its BF16_Optimizer: at stage 1 with fp32 accumulation of 16-bit
        gradients. Its fp32 gradients are not partitioned (`_do_optimizer_sanity_check`, engine.py).
        """
        return (
            self.stage == 1
            and self.weight_bytes == 2
            and self.gradient_bytes == 4
            and not self.offloads_optimizer
        )

    def share(self, elements: int) -> int:
        """Return the number of elements in one rank's ZeRO partition."""
        return -(-elements // self.ranks)

    def optimized(self, elements: int) -> int:
        """Return the number of elements whose master weights and moments are on one rank.

        `elements` counts this rank's elements without ZeRO, and the elements of all ZeRO ranks with
        it.
        """
        return elements if self.stage == 0 else self.share(elements)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a separate copy of the weights.

        ZeRO always makes one, even of fp32 weights: stage 3 intends to skip it but compares a
        device with a string. Without ZeRO, fp32 weights need none.
        """
        return self.stage > 0 or self.weight_bytes < self.master_bytes

    @property
    def keeps_inputs(self) -> bool:
        """Whether a linear layer keeps its input although its weight is frozen. DeepSpeed's own
        layer at stage 3 does (`LinearFunctionForZeroStage3.setup_context`, zero/linear.py).
        """
        uses_linear = not model_of(self.config.model).inputs_first
        return self.stage == 3 and self.memory_efficient_linear and uses_linear

    @property
    def average_bytes(self) -> int:
        """Bytes of the weights' moving average per element that is optimized on this rank."""
        return 0 if self.config.training.ema_decay is None else 4

    def moments(self, stage: Stage) -> int:
        """Return the unpartitioned bytes of the optimizer states of a pipeline stage."""
        return sum(
            self._moment_bytes(piece) * (piece.partitioned if self.stage else piece.total) // 256
            for piece in stage.trained.pieces
        )

    def _moment_bytes(self, piece: Piece) -> int:
        """Return the bytes of all moments of 256 elements (so that 8-bit scales are whole numbers).

        trainctl's adafactor factors its second moment. torch's adafactor, in a user's program, gets
        flat partitions from ZeRO and cannot factor them, so its second moment is whole.
        """
        spec = spec_of(self.optimizer)
        if spec.has_factored_states:
            return round(256 * 4 * piece.factors / piece.numel) if self.factors else 256 * 4
        is_matrix = spec.has_matrix_rule and piece.is_matrix and piece.in_block
        copies = len(spec.states_of(self.optimizer, is_matrix=is_matrix))
        return round(256 * copies * (spec.state_bytes or self.moment_bytes))

    def groups(self, stage: Stage) -> tuple[Group, ...]:
        """Return the optimizer's parameter groups of a pipeline stage."""
        return stage_groups(self.config, stage.trained)

    def sub_group(self, group: Group) -> int:
        """Return the number of elements that a rank updates at once in a parameter group."""
        own = self.optimized(group.elements)
        return min(own, self.zero.sub_group_size) if self.stage == 3 else own

    def update_bytes(self, group: Group) -> int:
        """Return the bytes of the temporary copies made by one update of a parameter group."""
        update = self.muon_update if group.uses_muon else self.update
        at_once = self.sub_group(group)
        if self.stage == 0 and update.by_tensor:
            at_once = group.largest
        whole = max(group.largest, group.largest_whole) if update.whole_tensors else group.largest
        return update.temporary_bytes(at_once, whole)

    def device_share_of_offload(self, groups: tuple[Group, ...]) -> float:
        """Return the fraction of an offloaded optimizer that stays on the device. It is whole
        sub-groups, by `int((1 - ratio) * sub_groups)` of `_create_fp32_partitions` (stage3.py).
        """
        if self.stage != 3 or self.offload.optimizer is not OffloadDevice.cpu:
            return 0.0
        size = self.zero.sub_group_size
        count = sum(max(1, -(-self.share(group.elements) // size)) for group in groups)
        return int((1 - self.offload.ratio) * count) / count if count else 0.0


def read_engine(plan: LayoutPlan) -> EngineMemory:
    """Return the memory view of a plan's engine.

    The user's `deepspeed` section is read for keys that have no option of their own.
    """
    config = plan.config
    precision, passed = config.precision, config.deepspeed.get("zero_optimization")
    used = number_formats(precision)
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    return EngineMemory(
        config=config,
        ranks=plan.shard_ranks,
        weight_bytes=BYTES[used.weights],
        gradient_bytes=BYTES[used.gradient_accumulation],
        communication_bytes=BYTES[used.communication],
        master_bytes=BYTES[precision.master_weights],
        moment_bytes=BYTES[precision.optimizer_states],
        accumulates=plan.batch.gradient_accumulation_steps > 1,
        update=update_copies(plan, uses_muon=False),
        muon_update=update_copies(plan, uses_muon=True),
        memory_efficient_linear=passed.get("memory_efficient_linear", True)
        if isinstance(passed, dict)
        else True,
        autocast=precision.autocast,
        on_cpu=on_cpu,
        factors=config.trains_itself,
    )


def update_copies(plan: LayoutPlan, *, uses_muon: bool) -> Update:
    """Return the copies that an update of a parameter group makes besides gradients and states.

    A test compares trainctl's own rules (`trainctl.train.optimizers`) with the allocations of torch
    during their steps.
    """
    config, spec = plan.config, spec_of(plan.config.optimizer)
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    if config.trains_itself:
        if uses_muon and spec.matrix_update is not None:
            half = compute_bytes(plan) // 2
            ((at_once, matrix),) = spec.matrix_update.moments
            if plan.mesh.tensor > 1:
                matrix += 2  # the matrix as it was gathered
            return replace(spec.matrix_update, moments=((at_once, matrix * half),))
        is_ours = optimizer_maker(config, plan.hardware) is Maker.trainctl
        if is_ours and spec.update is not None:
            return spec.update
        if is_fused(config, plan.hardware):
            return KERNEL
        if is_ours:
            return PLAIN  # AdamW for the other tensors updates one flat tensor at a time
    elif spec.device_operator:
        return KERNEL
    return PLAIN if on_cpu else FOREACH
