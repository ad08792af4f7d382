"""Recorder of a replay's activations, gradients and updates (`trainctl.runs.recording`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from trainctl.engines.shards import ElementRange, ParameterPiece, sum_of_squares
from trainctl.options.callbacks import Callback, Context
from trainctl.plans.mixture import StagedBatches, stages_of_plan
from trainctl.plans.shapes import head_dim
from trainctl.runs.recording import (
    GROUPS,
    PROJECTIONS,
    RecordedKind,
    Recording,
    Summary,
    num_groups,
    signs,
)
from trainctl.runs.replays import RecordingSettings
from trainctl.train.models.model import blocks
from trainctl.train.models.recompute import is_recomputing
from trainctl.train.session import Session

CHUNK = 1 << 22
"""Elements that are summarised at a time: 32 MiB in fp64."""

INPUT = " (input)"
"""Suffix of the name of a layer whose input is recorded, such as the output of attention."""


class TensorRecorder(Callback):
    """Records every step by forward hooks, the gradients, and the weights before and after.

    It reads tensors and draws nothing at random, so losses are those of a run without it. Between
    backward and update it keeps 4 bytes in host memory for each weight that the rank counts.

    Args:
        settings: What to record, and how to compute.
    """

    def __init__(self, session: Session, settings: RecordingSettings) -> None:
        self._session, self._settings = session, settings
        self._recording = Recording()
        self._stages = StagedBatches(stages_of_plan(session.plan))
        model = session.plan.config.model
        self._head_dim = None if model.is_module else head_dim(model)
        self._names = _Names(session)
        self._hooks: list[RemovableHandle] = []
        self._reordering = ExitStack()
        self._passes: dict[str, int] = defaultdict(int)
        self._activations: dict[str, Summary] = {}
        self._gradients: dict[str, Summary] = {}
        self._weights: list[torch.Tensor] | None = None
        self._positions = np.zeros((0, 0), np.int64)

    def on_train_start(self, context: Context) -> None:
        """Hook every layer, unless layers are compiled: a hook would change what is compiled."""
        if self._session.plan.config.kernels.is_compiled:
            return
        for module, name, parameter in self._names.layers(context.module):
            place = None if parameter is None else self._names.pieces.get(parameter)
            if place is not None and place.is_expert:
                continue  # it gets tokens of other ranks
            hook = partial(self._add, name, place)
            self._hooks.append(module.register_forward_hook(hook))
            if name in self._names.with_input:
                hook = partial(self._add, name + INPUT, place)
                self._hooks.append(module.register_forward_pre_hook(hook))

    def before_step(self, context: Context) -> None:
        self._passes.clear()
        self._activations, self._gradients, self._weights = {}, {}, None
        progress = self._session.progress
        first, batch = self._stages.at(progress.step, progress.samples)
        self._length = batch.sequence_length
        self._positions = self._session.training.counters(first, batch) - first
        self._samples = batch.global_batch_size
        self._reordering.close()
        if self._settings.reorder:
            self._reordering.enter_context(_ReorderedProducts())

    def after_backward(self, context: Any) -> None:
        self._reordering.close()
        context.beat("recording")
        if context.has_gradients:
            self._gradients = self._parameters(
                (part.place, part.values) for part in context.gradients() if part.is_counted
            )
        self._weights = [
            part.values.to("cpu", torch.float32, copy=True)
            for part in context.weights()
            if part.is_counted
        ]

    def after_step(self, context: Context) -> None:
        self._reordering.close()
        context.beat("recording")
        found = self._recording
        found.losses[context.step] = context.loss if context.loss is not None else float("nan")
        updates: dict[str, Summary] = {}
        if self._weights is not None:
            found.roundings.clear()
            updates = self._parameters(self._updates(context, self._weights))
        of_kinds = {
            RecordedKind.forward: {n: _on_host(each) for n, each in self._activations.items()},
            RecordedKind.gradient: self._gradients,
            RecordedKind.update: updates,
        }
        for kind, summaries in of_kinds.items():
            for name, summary in summaries.items():
                found.summaries[context.step, kind, name] = summary
        self._activations, self._gradients, self._weights = {}, {}, None

    def on_train_end(self, context: Context) -> None:
        folder = self._session.run.recording
        self._recording.write(
            folder / f"rank-{self._session.process.rank}.npz", self._session.mesh.pipeline.index
        )

    def close(self) -> None:
        self._reordering.close()
        for hook in self._hooks:
            hook.remove()

    def _features(
        self, module: nn.Module, piece: ParameterPiece | None, *, is_input: bool
    ) -> tuple[int, torch.Tensor] | None:
        """Return the whole number of features, and those that this rank's part has.

        None if every rank has all of them. The part is empty if it cannot be told, because a hook
        of tensor parallelism exchanges the layer's output, and if another rank counts the same
        key-value heads.
        """
        if piece is None or len(piece.shape) > 2:  # a block, or experts
            return None
        if isinstance(module, nn.Embedding) or len(piece.shape) == 1:
            return piece.shape[-1], torch.arange(piece.shape[-1])
        rows, columns = piece.shard.rows_and_columns(piece.shape, torch.device("cpu"))
        takes_columns = is_input != piece.inputs_first
        is_exchanged = not is_input and len(module._forward_hooks) > 1
        is_copy = piece.gradient_parts > 1 and not (piece.shard.is_whole or piece.is_saved_here)
        own = columns if takes_columns else rows
        return piece.shape[1 if takes_columns else 0], own[:0] if is_exchanged or is_copy else own

    def _add(
        self, name: str, piece: ParameterPiece | None, module: nn.Module, inputs: Any, *output: Any
    ) -> None:
        """Add a layer's output, or its input if there is no output yet (a forward hook or
        pre-hook): a tensor of (samples, positions, features), or this rank's part of it.
        """
        (values,) = output or (inputs,)
        if not module.training or is_recomputing():
            return
        number = self._passes[name]
        self._passes[name] += 1
        tensor = values if isinstance(values, torch.Tensor) else next(iter(values), None)
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        if number >= len(self._positions):
            return
        samples = self._positions[number]
        if tensor.dim() == 2 and len(tensor) % len(samples) == 0:
            tensor = tensor.view(len(samples), -1, tensor.shape[-1])
        if tensor.dim() != 3 or len(tensor) != len(samples):
            return
        length, width = tensor.shape[1:]
        axes = self._session.mesh
        features = self._features(module, piece, is_input=not output)
        count, own = features or (width, torch.arange(width))
        if width == count:
            own = torch.arange(width)
        elif width != len(own):
            return
        places = torch.arange(self._length)
        is_whole = length == self._length
        # Tensor ranks may share the tokens of whole sequences (`sequence_sharded_norms`).
        is_shared = not is_whole and axes.part.is_whole
        if not is_whole:
            mine = axes.part.of(places.unsqueeze(0))[0]
            places = mine[axes.tensor.index * length :][:length] if is_shared else mine
            if len(places) != length or (is_shared and length * axes.tensor.size != self._length):
                return
        is_part = width != count or is_shared
        if not is_part and not axes.tensor.is_first:
            return  # every tensor rank has it
        if name not in self._recording.order:
            self._recording.order.append(name)
        self._recording.sizes[name] = (self._samples, count)
        found = self._summary(
            tensor.detach(),
            name,
            samples,
            places.to(tensor.device),
            count,
            own.to(tensor.device),
        )
        known = self._activations.get(name)
        self._activations[name] = found if known is None else known + found

    def _summary(
        self,
        tensor: torch.Tensor,
        name: str,
        samples: np.ndarray[Any, Any],
        places: torch.Tensor,
        count: int,
        features: torch.Tensor,
    ) -> Any:
        """Return the summary of a part of an activation, as tensors on its device.

        Args:
            tensor: (samples, positions, features).
            samples: Position of each sample in the global batch.
            places: The tensor's positions in the sequence.
            count: Features of the whole tensor.
            features: Index of each of the tensor's features.
        """
        device = tensor.device
        table = partial(_sign_table, device=device)
        of_samples = table(self._samples, "sample")[:, torch.from_numpy(samples).to(device)]
        of_features = table(count, "feature")[:, features]
        of_positions = table(self._length, "place")[:, places]
        size, width = len(tensor), tensor.shape[2]
        squares = torch.zeros(size, width, dtype=torch.float64, device=device)
        sums = torch.zeros(PROJECTIONS, size, width, dtype=torch.float64, device=device)
        each = max(1, CHUNK // max(1, size * width))
        for at in range(0, tensor.shape[1], each):
            values = tensor[:, at : at + each].double()
            squares += values.square().sum(1)
            sums += torch.einsum("pt,btf->pbf", of_positions[:, at : at + each], values)
        sums *= of_features[:, None]
        lines = torch.cat((squares.sum(1)[None], sums.sum(2)))
        columns = torch.cat((squares.sum(0)[None], (sums * of_samples[..., None]).sum(1)))
        line_group = torch.from_numpy(samples * min(self._samples, GROUPS) // self._samples)
        groups = num_groups(count, name, self._head_dim)
        return Summary(
            _grouped(lines, line_group.to(device), min(self._samples, GROUPS)),
            _grouped(columns, features * groups // count, groups),
        )

    def _updates(
        self, context: Any, before: Sequence[torch.Tensor]
    ) -> Iterator[tuple[ElementRange, torch.Tensor]]:
        """Yield place and change of each counted piece of the weights."""
        counted = (part for part in context.weights() if part.is_counted)
        roundings = self._recording.roundings
        for part, old in zip(counted, before, strict=True):
            unit = torch.finfo(part.values.dtype).eps / 4  # root mean square of rounding to nearest
            square = float(sum_of_squares(part.values)) * unit**2
            roundings[part.name] = roundings.get(part.name, 0.0) + square
            yield part.place, part.values.float() - old.to(part.values.device)

    def _parameters(self, parts: Iterator[tuple[ElementRange, torch.Tensor]]) -> dict[str, Summary]:
        """Return summaries of this rank's elements of parameters."""
        found: dict[str, Summary] = {}
        for place, values in parts:
            shape = self._session.shapes[place.name]
            width = shape[-1] if len(shape) > 1 else 1
            size = int(np.prod(shape)) // width, width
            self._recording.sizes[place.name] = size
            for row, column, block in _cut_into_blocks(place, width, values):
                summary = self._of_block(place.name, size, row, column, block.double())
                known = found.get(place.name)
                found[place.name] = summary if known is None else known + summary
        return {name: _on_host(summary) for name, summary in found.items()}

    def _of_block(
        self, name: str, size: tuple[int, int], row: int, column: int, block: torch.Tensor
    ) -> Any:
        """Return the summary of a block of a parameter's matrix, as tensors on its device.

        Args:
            size: Rows and columns of the matrix.
            row: First row of the block.
            column: First column of the block.
        """
        device, (height, width) = block.device, block.shape
        of_rows = _sign_table(size[0], "row", device=device)[:, row : row + height]
        of_columns = _sign_table(size[1], "column", device=device)[:, column : column + width]
        squares = block.square()
        lines = torch.cat((squares.sum(1)[None], of_rows * (block @ of_columns.T).T))
        columns = torch.cat((squares.sum(0)[None], of_columns * (of_rows @ block)))
        found = []
        for sums, first, whole in ((lines, row, size[0]), (columns, column, size[1])):
            groups = num_groups(whole, name, self._head_dim)
            places = torch.arange(first, first + sums.shape[1], device=device)
            found.append(_grouped(sums, places * groups // whole, groups))
        return Summary(found[0], found[1])  # type: ignore[arg-type]


def _cut_into_blocks(
    place: ElementRange, width: int, values: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the elements of a flat piece as blocks of the parameter's matrix.

    Args:
        width: Columns of the whole matrix.

    Yields:
        First row, first column and the block.
    """
    shard, each, left = place.shard, width, 0
    if shard is None or shard.is_whole:
        runs = [(place.start, values)]
    elif shard.row == width:  # columns of every row
        runs, each, left = [(place.start, values)], shard.width, shard.start
    else:
        runs = []
        start = place.start
        while start < place.start + len(values):
            row, inside = divmod(start, shard.width)
            at = start - place.start
            runs.append(
                (row * shard.row + shard.start + inside, values[at:][: shard.width - inside])
            )
            start += shard.width - inside
    for first, run in runs:
        at = 0
        while at < len(run):
            row, column = divmod(first + at, each)
            rest = len(run) - at
            whole_rows = min(rest // each, max(1, CHUNK // each)) if column == 0 else 0
            count = whole_rows * each or min(each - column, rest)
            block = run[at : at + count]
            yield row, left + column, block.view(whole_rows or 1, -1)
            at += count


def _grouped(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the columns of `values` by group: (groups, rows of `values`)."""
    sums = torch.zeros(count, len(values), dtype=torch.float64, device=values.device)
    return sums.index_add_(0, group, values.T.contiguous())


def _on_host(summary: Any) -> Summary:
    return Summary(summary.lines.cpu().numpy(), summary.columns.cpu().numpy())


@cache
def _sign_table(size: int, axis: str, *, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(signs(size, axis)).to(device)


class _Names:
    """Names of a rank's layers as transformers has them in the whole model."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.pieces: Mapping[str, ParameterPiece] = {
            piece.name: piece for piece in session.engine.pieces.values()
        }
        self.with_input: set[str] = set()
        """Names of layers whose input is recorded: the last product of each part of a block."""

    def layers(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, str | None]]:
        """Yield each block and each layer with parameters of its own, with its name and the name
        of its weight.
        """
        layers = blocks(module)
        local = {part: name for name, part in module.named_modules()}
        lists = dict.fromkeys(local[layer].rpartition(".")[0] for layer in layers)
        starts = dict(zip(lists, self._first_blocks(), strict=False))
        prefix = next(iter(starts), ".")
        known = self._session.shapes.keys() | self.pieces.keys()
        list_name = prefix.rpartition(".")[2]
        whole = next(
            (m[1] for n in sorted(known) if (m := re.match(rf"(.*\b{list_name})\.\d+\.", n))),
            prefix,
        )
        last: dict[str, str] = {}
        found = []
        for part, path in local.items():
            is_block = part in layers
            own = [name for name, _ in part.named_parameters(recurse=False)]
            if not own and not is_block:
                continue
            home = next((each for each in starts if path.startswith(each + ".")), None)
            if home is not None:
                number, _, rest = path[len(home) + 1 :].partition(".")
                name = f"{whole}.{int(number) + starts[home]}" + (f".{rest}" if rest else "")
            else:
                name = self._outside(path.rpartition(".")[2], own, known)
            weight = next((n for n in (f"{name}.{each}" for each in own) if n in known), None)
            if weight is None and own and isinstance(part, nn.Linear):
                weight = next((n for n, piece in self.pieces.items() if piece.is_embedding), None)
            found.append((part, name, weight))
            if home is not None and not is_block and _is_product(part):
                last[name.rpartition(".")[0]] = name
        self.with_input = set(last.values())
        yield from found

    def _first_blocks(self) -> tuple[int, ...]:
        plan, pipeline = self._session.plan, self._session.mesh.pipeline
        if pipeline.size == 1:
            return (0,)
        return tuple(plan.stages[stage].start for stage in plan.stages_of(pipeline.index))

    @staticmethod
    def _outside(last: str, own: list[str], known: Any) -> str:
        """Return the name of a layer outside the blocks from the last part of its path."""
        for each in own:
            for name in sorted(known):
                if name == f"{last}.{each}" or name.endswith(f".{last}.{each}"):
                    return name[: -len(each) - 1]
        return last


def _is_product(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


class _ReorderedProducts(TorchDispatchMode):
    """Mode in which matrix products add their terms in another order, forward and backward.

    Both factors are permuted along the dimension that is summed over, so the products are the same
    but for rounding.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FIRST_FACTOR.get(func.name())
        if first is not None and all(type(each) in _PLAIN for each in args[first : first + 2]):
            left, right = args[first : first + 2]
            order = _other_order(left.shape[-1], left.device)
            factors = left.index_select(-1, order), right.index_select(-2, order)
            args = (*args[:first], *factors, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


_FIRST_FACTOR = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Position of the first factor among the arguments of a product."""
_PLAIN = (torch.Tensor, nn.Parameter)


@cache
def _other_order(size: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).permutation(size)).to(device)
