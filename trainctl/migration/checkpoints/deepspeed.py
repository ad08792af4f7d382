"""Reader of DeepSpeed's own checkpoints: ZeRO 0 to 3, with its fp16 and bf16 optimizers.

Layout (deepspeed/runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py, 0.19):

- `mp_rank_00_model_states.pt`, at ZeRO 3 `zero_pp_rank_R_mp_rank_00_model_states.pt` of each rank:
  weights in the compute format, counters, `param_shapes` by parameter group in the order of the
  flat tensors, parameters that did not train.
- `zero_pp_rank_R_mp_rank_00_optim_states.pt` of each rank (`bf16_` or `fp16_` before it): flat fp32
  weights and states of Adam. At ZeRO 1 and 2 the parameters of a group lie behind each other, and
  the whole is cut into equal partitions, one a rank. At ZeRO 3 each parameter is cut into equal
  partitions, and a rank's flat tensors hold its partitions behind each other.
- Without ZeRO the optimizer's state is in the model's file.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.model_parallel import (
    UNIVERSAL,
    PipelineSource,
    TensorParallelSource,
)
from trainctl.migration.checkpoints.source import Source, SourceProgress, order_by_shape
from trainctl.migration.checkpoints.unpickle import (
    LazyTensor,
    TorchFile,
    as_numbers,
    damaged,
    read_pointer,
)
from trainctl.migration.configs.pickled import Record
from trainctl.train.checkpoint.optimizer_state import MASTER

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SLICED_LAYER = re.compile(r"layer_\d+-model_(?!00-)\d+-model_states\.pt")
_EXPERTS = re.compile(r"(layer_\d+_)?expert_\d+_.*|expp_rank_.*")

Shape = tuple[int, ...]


def is_here(directory: Path) -> bool:
    """Return True if the directory, or the newest step in it, holds a DeepSpeed checkpoint."""
    return any(_MODEL.fullmatch(path.name) for path in _step_folder(directory).iterdir())


def _step_folder(directory: Path) -> Path:
    """Return the folder of a step: the directory itself, or the one that `latest` names."""
    pointer = directory / "latest"
    if pointer.is_file():
        named = directory / read_pointer(pointer)
        if named.is_dir():
            return named
        raise damaged(pointer, f"it names {named.name}, which is not there")
    return directory


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of a parameter inside one flat tensor."""

    start: int
    """First element in the flattened parameter."""
    numel: int
    tensors: Mapping[str, LazyTensor]
    """The flat tensor of each state."""
    offset: int
    """First element in the flat tensors."""


def open_source(directory: Path) -> Source:
    """Open a checkpoint of DeepSpeed.

    Raises:
        TrainctlError: A shard is missing, damaged or of another world size (exit code 5), which
            names it; or the layout is one that is not read.
    """
    folder = _step_folder(directory)
    names = sorted(path.name for path in folder.iterdir())
    experts = [name for name in names if _EXPERTS.fullmatch(name)]
    if experts:
        raise TrainctlError(f"{folder / experts[0]}: experts of DeepSpeed's MoE are not read")
    models = _grid(folder, _MODEL, names)
    if "offloaded_tensors" in names:
        raise TrainctlError(
            f"{folder / 'offloaded_tensors'}: states that were offloaded to NVMe are not read",
            hint="save after training a step without NVMe, or: " + UNIVERSAL,
        )
    shards = _grid(folder, _OPTIMIZER, names)
    lonely = sorted(shards.keys() - models.keys())
    if lonely:
        raise damaged(shards[lonely[0]][0], "the weights of its model-parallel rank are missing")
    ranks = [DeepSpeedSource(directory, models[rank], shards.get(rank, [])) for rank in models]
    size = ranks[0].model_parallel_size
    missing = next((rank for rank in range(size) if rank not in models), None)
    if missing is not None:
        name = models[min(models)][0].name.replace(f"{min(models):02d}_m", f"{missing:02d}_m")
        raise damaged(folder / name, f"it is missing: {size} model-parallel ranks saved")
    if size == 1:
        return ranks[0]
    if not any(name.startswith("layer_") for name in names):
        return TensorParallelSource(directory, ranks, ranks[0].universal_info)
    if any(_SLICED_LAYER.fullmatch(name) for name in names):
        raise TrainctlError(f"{folder} is cut over pipeline and tensor ranks", hint=UNIVERSAL)
    return PipelineSource(directory, ranks)


def _grid(folder: Path, pattern: re.Pattern[str], names: Sequence[str]) -> dict[int, list[Path]]:
    """Return the files of each model-parallel rank, by data-parallel rank.

    Raises:
        TrainctlError: One between the others is missing.
    """
    found: dict[int, dict[int, Path]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[2]), {})[int(match[1] or 0)] = folder / name
    grid = {}
    for rank, paths in sorted(found.items()):
        example = paths[max(paths)].name
        for number in range(max(paths)):
            if number not in paths:
                name = re.sub(r"pp_rank_\d+", f"pp_rank_{number}", example)
                raise damaged(folder / name, "it is missing")
        grid[rank] = [paths[number] for number in sorted(paths)]
    return grid


class DeepSpeedSource(Source):
    """The files of one model-parallel rank of a checkpoint: usually all of it."""

    format = "deepspeed"

    def __init__(self, directory: Path, models: list[Path], shards: list[Path]) -> None:
        self.path, self.notes = directory, []
        self._models = [TorchFile(path) for path in models]
        self._shards = [TorchFile(path) for path in shards]
        self._facts: dict[str, Any] = self._models[0].content
        if "module" not in self._facts or "ds_version" not in self._facts:
            raise damaged(models[0], "it is no model state of DeepSpeed")
        # At ZeRO 3 the module has empty tensors in place of the partitioned ones.
        module = _tensors(self._facts["module"])
        self._weights = {name: tensor for name, tensor in module.items() if tensor.numel}
        self._segments: dict[str, list[Segment]] = {}
        self.shapes: dict[str, Shape] = {}
        optimizer = self._optimizer_state()
        if optimizer is None:
            self._read_plain()
        elif "fp32_flat_groups" in optimizer:
            self._require_world_size(optimizer, self._models)
            self._read_partitioned_parameters()
        else:
            self._require_world_size(optimizer, self._shards)
            self._read_partitioned_groups()
        self._require_same_step()
        self._add_untrained()
        if optimizer is not None and "fp32_flat_groups" not in optimizer:
            self._add_unlisted()
        if len(self._shards) > 1 and not self._weights:
            self.unchecked = (
                "that no two files of ranks were swapped, which their names alone tell",
            )
        states = {state for each in self._segments.values() for s in each for state in s.tensors}
        self.states = (MASTER, *sorted(states - {MASTER}))
        self._read_progress(optimizer or self._facts.get("optimizer") or {})

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that the model is cut over."""
        return int(self._facts.get("mp_world_size") or 1)

    @property
    def universal_info(self) -> Mapping[str, Any]:
        """Patterns that say how parameters are cut over tensor-parallel ranks."""
        found = self._facts.get("universal_checkpoint_info")
        return found if isinstance(found, dict) else {}

    def read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        result = torch.empty(end - start)
        missing = end - start
        for segment in self._segments[parameter]:
            first, last = max(start, segment.start), min(end, segment.start + segment.numel)
            if first < last:
                shift = segment.offset - segment.start
                if state not in segment.tensors:
                    raise damaged(segment.tensors[MASTER].storage.path, f"it has no {state}")
                tensor = segment.tensors[state]
                values = tensor.read(first + shift, last + shift)
                what = f"{parameter} ({state})"
                result[first - start : last - start] = as_numbers(values, tensor.storage.path, what)
                missing -= last - first
        if missing:
            raise damaged(self.path, f"{missing} elements of {parameter} ({state}) are missing")
        if state == MASTER and parameter in self._weights:
            self._compare_weights(parameter, start, result)
        return result

    def _compare_weights(self, parameter: str, start: int, masters: torch.Tensor) -> None:
        """Refuse master weights that are not the weights of the model's file: shards were swapped.

        Raises:
            TrainctlError: They differ by more than the rounding to the type of the weights.
        """
        tensor = self._weights[parameter]
        there = tensor.read(start, start + masters.numel())
        if not torch.equal(masters.to(tensor.dtype), there):
            raise damaged(
                self._models[0].path,
                f"{parameter} in it is not that of the optimizer's files: they are of another "
                "save, or were swapped",
            )

    def verify(self) -> None:
        for file in (*self._models, *self._shards):
            file.verify()

    def _optimizer_state(self) -> dict[str, Any] | None:
        """Return the first rank's optimizer state; None without ZeRO."""
        if not self._shards:
            if self._facts.get("optimizer") is None:
                raise damaged(self._models[0].path.with_name("*_optim_states.pt"), "none is there")
            return None
        return _optimizer_of(self._shards[0])

    def _require_world_size(self, optimizer: Mapping[str, Any], files: list[TorchFile]) -> None:
        """Refuse a checkpoint with fewer or more files than its ranks were."""
        counts = optimizer["partition_count"]
        count = max(counts) if isinstance(counts, list) else int(counts)
        for listed in (self._shards, files):
            if len(listed) < count:
                name = re.sub(r"pp_rank_\d+", f"pp_rank_{len(listed)}", listed[0].path.name)
                raise damaged(listed[0].path.with_name(name), f"it is missing: {count} ranks saved")
            if len(listed) > count:
                raise damaged(
                    listed[count].path, f"it is of another checkpoint: {count} ranks saved"
                )

    def _require_same_step(self) -> None:
        """Refuse shards of several saves: one of them was interrupted, or files were mixed."""
        steps = [step_of(state := _optimizer_of(f), _parameter_groups(state)) for f in self._shards]
        for shard, step in zip(self._shards, steps, strict=True):
            if step != steps[0]:
                raise damaged(shard.path, f"it is of step {step}, and the first one of {steps[0]}")
        for file in self._models:
            there, first = (each.get("global_steps") for each in (file.content, self._facts))
            if there != first:
                raise damaged(file.path, f"it is of step {there}, and the first one of {first}")

    def _groups(self) -> list[dict[str, Shape]]:
        """Return the shapes of the trained parameters by group, as the flat tensors have them."""
        groups = self._facts.get("param_shapes")
        if not isinstance(groups, list):
            raise damaged(self._models[0].path, "it has no param_shapes")
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    def _read_partitioned_groups(self) -> None:
        """Find the parameters of ZeRO 1 and 2: partitions of whole groups."""
        optimizers = [_optimizer_of(file) for file in self._shards]
        paddings = optimizers[0].get("param_alignment_paddings")
        groups = self._groups()
        for file, optimizer in zip(self._shards, optimizers, strict=True):
            if len(optimizer["single_partition_of_fp32_groups"]) != len(groups):
                raise damaged(file.path, f"it has not the {len(groups)} parameter groups")
        for index, group in enumerate(groups):
            flats = [
                {MASTER: optimizer["single_partition_of_fp32_groups"][index]}
                | _states_of_group(optimizer["base_optimizer_state"], index)
                for optimizer in optimizers
            ]
            # Trailing padding may be cut off, so only the first ranks have whole partitions.
            size = max(flat[MASTER].numel for flat in flats)
            gaps = paddings[index] if paddings else [0] * len(group)
            position = 0
            for (name, shape), gap in zip(group.items(), gaps, strict=True):
                numel = math.prod(shape)
                self._add(name, shape, _cut(position, numel, size, flats))
                position += numel + gap
            lean = position - sum(gaps[-1:])
            whole = {_partition_size(numel, len(flats)) for numel in (lean, position)}
            if size not in whole | {-(-lean // len(flats))}:
                why = f"a group of {lean:,} elements is in partitions of {size:,}"
                raise damaged(self._shards[0].path, why)
            self._require_elements(lean, size, max(size, *whole), flats)

    def _require_elements(
        self, wanted: int, size: int, padded: int, flats: Sequence[Mapping[str, LazyTensor]]
    ) -> None:
        """Refuse partitions with missing or further elements; only the last ones have padding."""
        for rank, flat in enumerate(flats):
            least = min(size, max(0, wanted - rank * size))
            for state, tensor in flat.items():
                if not least <= tensor.numel <= padded:
                    why = f"{state} has {tensor.numel:,} elements, and {least:,} are needed"
                    raise damaged(self._shards[rank].path, why)

    def _read_partitioned_parameters(self) -> None:
        """Find the parameters of ZeRO 3: partitions of each parameter."""
        optimizers = [_optimizer_of(file) for file in self._shards]
        world = len(optimizers)
        ranks = [
            [
                {MASTER: flat} | _states_of_group(optimizer["optimizer_state_dict"], index)
                for index, flat in enumerate(optimizer["fp32_flat_groups"])
            ]
            for optimizer in optimizers
        ]
        for file, flats in zip(self._shards, ranks, strict=True):
            for flat in flats:
                for state, tensor in flat.items():
                    if tensor.numel != flat[MASTER].numel:
                        why = f"{state} has {tensor.numel:,} elements, and the weights have "
                        raise damaged(file.path, why + f"{flat[MASTER].numel:,}")
        ends = [[*accumulate(flat[MASTER].numel for flat in flats)] for flats in ranks]
        position = 0
        for name, shape in ((n, s) for group in self._groups() for n, s in group.items()):
            numel = math.prod(shape)
            size = -(-numel // world)
            segments = []
            for rank, flats in enumerate(ranks):
                held = max(0, min(size, numel - rank * size))
                place, done = position, 0
                while done < held:
                    index = bisect_right(ends[rank], place)
                    if index == len(flats):
                        raise damaged(self._shards[rank].path, f"{name} is not all in it")
                    count = min(held - done, ends[rank][index] - place)
                    begin = ends[rank][index] - flats[index][MASTER].numel
                    start = rank * size + done
                    segments.append(Segment(start, count, flats[index], place - begin))
                    place, done = place + count, done + count
            self._add(name, shape, segments)
            position += size
        for rank, listed in enumerate(ends):
            if position != listed[-1]:
                why = f"its flat tensors have {listed[-1]:,} elements, not {position:,}"
                raise damaged(self._shards[rank].path, why)

    def _read_plain(self) -> None:
        """Find the parameters and states of a checkpoint without ZeRO."""
        buffers = set(self._facts.get("buffer_names") or ())
        weights = _tensors(self._facts["module"], without=buffers)
        saved = self._facts["optimizer"]
        inner = saved.get("optimizer_state_dict", saved)
        path = self._models[0].path
        if "fp32_groups_flat" in saved:  # FP16_Optimizer: each group is one flat tensor
            groups = [
                {MASTER: flat} | _states_of_group(inner, index)
                for index, flat in enumerate(saved["fp32_groups_flat"])
            ]
            sizes = [flat[MASTER].numel for flat in groups]
            if len(groups) > 1 or sum(t.numel for t in _untied(weights).values()) != sizes[0]:
                raise TrainctlError(
                    f"{path}: which parameters are in which flat group is not saved",
                    hint="save with ZeRO 1, which saves it",
                )
            position = 0
            for name, tensor in _untied(weights).items():
                self._add(name, tensor.shape, [Segment(0, tensor.numel, groups[0], position)])
                position += tensor.numel
            return
        masters = [each for group in saved.get("fp32_groups", ()) for each in group]
        shapes = {name: tensor.shape for name, tensor in _untied(weights).items()}
        for name, number in order_by_shape(shapes, inner, path).items():
            tensor = weights[name]
            held = {MASTER: masters[number] if masters else tensor}
            held |= _elementwise(inner["state"].get(number, {}), tensor.numel)
            self._add(name, tensor.shape, [Segment(0, tensor.numel, held, 0)])

    def _add_untrained(self) -> None:
        """Add the parameters that did not train; at ZeRO 3 each rank has a partition of each."""
        shapes: Mapping[str, Shape] = self._facts.get("frozen_param_shapes") or {}
        world = len(self._models)
        for name, shape in shapes.items():
            numel = math.prod(shape)
            size = -(-numel // world)
            parts = []
            for rank, file in enumerate(self._models):
                held = max(0, min(size, numel - rank * size))
                part = (file.content.get("frozen_param_fragments") or {}).get(name)
                if part is None or part.numel < held:
                    raise damaged(file.path, f"it lacks its part of {name}")
                if held:
                    parts.append(Segment(rank * size, held, {MASTER: part}, 0))
            self._add(name, tuple(shape), parts)
        self.untrained = frozenset(shapes)

    def _add_unlisted(self) -> None:
        """Add what only the weights have: ZeRO 1 lists no parameters that did not train."""
        skipped = {*(self._facts.get("buffer_names") or ()), *self._segments}
        skipped.update(self._facts.get("shared_params") or ())
        for name, tensor in _untied(_tensors(self._facts["module"])).items():
            if name not in skipped:
                self._add(name, tensor.shape, [Segment(0, tensor.numel, {MASTER: tensor}, 0)])
                self.untrained |= {name}

    def _add(self, name: str, shape: Shape, segments: Iterable[Segment]) -> None:
        self.shapes[name] = tuple(shape)
        self._segments[name] = list(segments)

    def _read_progress(self, optimizer: Mapping[str, Any]) -> None:
        facts, groups = self._facts, _parameter_groups(optimizer)
        first = groups[0] if groups else {}
        config = facts.get("ds_config") or {}
        configured = (config.get("optimizer") or {}).get("params")
        # AutoTP's ranks are counted as replicas.
        overcount = (config.get("tensor_parallel") or {}).get("autotp_size") or 1
        samples = facts.get("global_samples")
        self.progress = SourceProgress(
            step=facts.get("global_steps"),
            samples=None if samples is None else samples // overcount,
            learning_rate=_number(first.get("lr")),
        )
        self.hyperparameters = hyperparameters(groups or ([configured] if configured else ()))
        self.scalars = {"step": step} if (step := step_of(optimizer, groups)) is not None else {}
        self.loss_scale = _loss_scale(optimizer)
        skipped = int(facts.get("skipped_steps") or 0)
        if skipped:
            self.notes.append(f"{skipped:,} of the source's steps were skipped: fp16 overflowed")
        if facts.get("lr_scheduler"):
            self.notes.append("the state of the source's scheduler is not carried over")


def _optimizer_of(file: TorchFile) -> dict[str, Any]:
    found = file.content.get("optimizer_state_dict")
    if not isinstance(found, dict) or "partition_count" not in found:
        raise damaged(file.path, "it is no optimizer state of ZeRO")
    return found


def _parameter_groups(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer within DeepSpeed's wrapper."""
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict", optimizer))
    return list(inner.get("param_groups", ())) if isinstance(inner, dict) else []


def _states_of_group(optimizer: Any, index: int) -> dict[str, LazyTensor]:
    """Return the flat states of a group.

    Args:
        optimizer: A list with the states of each group (elastic checkpoints), or the `state_dict`
            of an optimizer of torch, whose parameters are the flat tensors in order.
    """
    if isinstance(optimizer, list):
        return _elementwise(optimizer[index])
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    return _elementwise(optimizer["state"].get(numbers[index], {}))


def _elementwise(state: Mapping[str, Any], numel: int | None = None) -> dict[str, LazyTensor]:
    """Return the states that are tensors of their parameter's size."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, LazyTensor) and value.shape and numel in (None, value.numel)
    }


def _tensors(module: Any, without: Collection[str] = ()) -> dict[str, LazyTensor]:
    """Return the tensors of a module's `state_dict`; empty if it was not saved."""
    items = module.items() if isinstance(module, dict) else ()
    return {n: each for n, each in items if isinstance(each, LazyTensor) and n not in without}


def _untied(weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the weights without the second names of tied ones, which share a storage."""
    found: dict[tuple[int, int], str] = {}
    for name, tensor in weights.items():
        found.setdefault((id(tensor.storage), tensor.start), name)
    return {name: weights[name] for name in found.values()}


def _cut(
    position: int, numel: int, size: int, flats: Sequence[Mapping[str, LazyTensor]]
) -> Iterator[Segment]:
    """Yield the segments of a parameter in partitions of `size` elements, one a rank."""
    done = 0
    while done < numel:
        rank, offset = divmod(position + done, size)
        if rank >= len(flats):
            return  # `_require_elements` names what is missing
        count = min(numel - done, size - offset)
        yield Segment(done, count, flats[rank], offset)
        done += count


def _partition_size(numel: int, ranks: int) -> int:
    """Return the elements of a rank's partition: groups are padded to two elements a rank."""
    return 2 * -(-numel // (2 * ranks))


def _number(value: Any) -> float | None:
    """Return a number that may be a tensor with one element."""
    if isinstance(value, LazyTensor):
        return value.item() if value.numel == 1 else None
    return float(value) if isinstance(value, int | float) else None


def step_of(optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the optimizer's own count of its updates; None if it is nowhere."""
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict", optimizer))
    states = inner if isinstance(inner, list) else list(inner.get("state", {}).values())
    found = [optimizer.get("base_optimizer_state_step"), *(s.get("step") for s in states)]
    found += [group.get("step") for group in groups]
    return next((number for each in found if (number := _number(each)) is not None), None)


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return an Adam's hyperparameters by trainctl's keys; the largest weight decay counts."""
    if not groups:
        return {}
    first, found = groups[0], {}
    for key, name in (("lr", "lr"), ("eps", "epsilon")):
        if (value := _number(first.get(key))) is not None:
            found[name] = value
    betas = first.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        found |= {"beta1": float(betas[0]), "beta2": float(betas[1])}
    decays = [_number(group.get("weight_decay")) or 0.0 for group in groups]
    return found | {"weight_decay": max(decays)}


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, float]:
    """Return the state of a dynamic loss scale; empty if it is fixed, or there is none."""
    scaler = optimizer.get("loss_scaler")
    values = scaler.fields if isinstance(scaler, Record) else optimizer
    names = ("cur_scale", "cur_iter", "last_overflow_iter")
    numbers = {name: _number(values.get(name)) for name in names}
    if None in numbers.values() or not optimizer.get("dynamic_loss_scale"):
        return {}
    hysteresis = _number(values.get("cur_hysteresis", values.get("delayed_shift", 1)))
    numbers["cur_hysteresis"] = 1.0 if hysteresis is None else hysteresis
    return {name: value for name, value in numbers.items() if value is not None}
