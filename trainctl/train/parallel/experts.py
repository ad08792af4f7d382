"""Expert parallelism: each rank of the expert axis holds some experts of every layer.

transformers' own modules stay. Their expert parameters are cut along the first dimension, and a
function that transformers calls for them sends each token to the ranks of its experts and back
(arXiv:2006.16668). No token is dropped, so results do not depend on how the batch is split.

The collectives of tensor ranks, each with the collective of its backward pass, are here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from trainctl.engines.process import Axis, ProcessMesh
from trainctl.engines.shards import Pieces, Shard
from trainctl.errors import TrainctlError

Transformation = Callable[[torch.Tensor, Axis], torch.Tensor]

_SEQUENCE_DIM = 1


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over the axis, on every rank of it."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=axis.group)
    return result


def all_gather(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return the ranks' tensors concatenated along `dim`, on every rank."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in axis.ranks]
    dist.all_gather(parts, tensor, group=axis.group)
    return torch.cat(parts, dim=dim)


def split_for_rank(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return this rank's equal part along `dim`, by default of the sequence."""
    return tensor.chunk(axis.size, dim=dim)[axis.index].contiguous()


def reduce_scatter(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return this rank's equal part, along `dim`, of the sum over the axis."""
    parts = [piece.contiguous() for piece in tensor.chunk(axis.size, dim=dim)]
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=axis.group)
    return result


def _identity(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    return tensor.view_as(tensor)


def _paired_function(there: Transformation, back: Transformation) -> Any:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:  # type: ignore[override]
            ctx.axis = axis
            return there(tensor, axis)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return back(gradient, ctx.axis), None

    return Pair


Copy = _paired_function(_identity, all_reduce)
"""Into a region: every rank uses the whole input."""
Reduce = _paired_function(all_reduce, _identity)
"""Out of a region: the ranks' partial results are summed."""
GatherToRegion = _paired_function(all_gather, reduce_scatter)
"""Into a region, from parts of the sequence."""
ReduceScatter = _paired_function(reduce_scatter, all_gather)
"""Out of a region, to parts of the sequence."""
GatherWidth = _paired_function(partial(all_gather, dim=-1), partial(reduce_scatter, dim=-1))
"""The ranks' columns side by side, of which each goes on with a part."""
Scatter = _paired_function(split_for_rank, all_gather)
"""This rank's part of the whole sequence."""
GatherSequence = _paired_function(all_gather, split_for_rank)
"""The whole sequence on each rank, of the ranks' parts."""
ScatterRows = _paired_function(partial(split_for_rank, dim=0), partial(all_gather, dim=0))
"""This rank's part of all rows."""
GatherRows = _paired_function(partial(all_gather, dim=0), partial(split_for_rank, dim=0))
"""All rows on each rank, of the ranks' parts."""

EXCHANGED = "trainctl_exchanged"
"""Name of `expert_parallel_forward` among transformers' implementations of experts."""

_groups: dict[str, dist.ProcessGroup] = {}
"""Process groups of this process's expert axes, by name: a custom operator takes no group."""


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules that hold a layer's experts in joined parameters, in the model's order."""
    # Set by the decorator of such classes (transformers.integrations.moe).
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def product_in_force(model: nn.Module) -> str | None:
    """Return the name of what multiplies the experts of a layer; None without joined experts.

    transformers' grouped products are torch's, or a loop where torch has none for the device.
    """
    for module in expert_modules(model):
        name: str = module.config._experts_implementation
        parameter = next(module.parameters())
        sample = parameter.new_empty(1, 16, 16)
        if name not in ("grouped_mm", EXCHANGED):
            return name
        has_product = moe._can_use_grouped_mm(sample[0], sample, None)
        return "grouped_mm" if has_product else "grouped_mm, by a loop"
    return None


def routers_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the router and the experts of each sparse layer, in the model's order.

    A router is a sibling of its experts with one row of weights per expert.
    """
    found = []
    experts = set(expert_modules(model))
    for parent in model.modules():
        children = list(parent.children())
        for module in (child for child in children if child in experts):
            beside = [child for child in children if _has_rows(child, module.num_experts)]
            if len(beside) == 1:
                found.append((beside[0], module))
    return found


def _has_rows(module: nn.Module, count: int) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[0] == count


def compute_in_fp32(model: nn.Module) -> None:
    """Let the routers of a 16-bit model compute scores and choices in fp32.

    Scores rounded to bf16 are often equal, and the choice between equal experts is chance
    (arXiv:2101.03961, section 2.4).
    """
    for router, _ in routers_of(model):
        router.forward = partial(_in_fp32, router)


def _in_fp32(router: nn.Module, hidden: torch.Tensor) -> Any:
    return type(router).forward(_InFp32(router), hidden.float())  # type: ignore[arg-type]


class _InFp32:
    """View of a router whose parameters are in fp32, as `self` of the router's own forward pass."""

    def __init__(self, router: nn.Module) -> None:
        self._router = router

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._router, name)
        return value.float() if isinstance(value, nn.Parameter) else value


def keep_local_experts(model: nn.Module, pieces: Pieces, mesh: ProcessMesh) -> Pieces:
    """Cut the experts of a skeleton to those on this rank.

    Returns:
        The pieces of the parameters that the model has now.

    Raises:
        TrainctlError: The model has no joined experts, or their number does not divide.
    """
    modules, axis = expert_modules(model), mesh.expert
    if not modules:
        raise TrainctlError(
            f"{type(model).__name__} has no experts for {axis.size} expert ranks that "
            "transformers has joined to one parameter a layer",
            hint="parallelism.expert=1",
        )
    ALL_EXPERTS_FUNCTIONS.register(EXCHANGED, expert_parallel_forward)
    _groups[axis.group.group_name] = axis.group
    cut = dict(pieces)
    for module in modules:
        count = module.num_experts
        for name, whole in list(module.named_parameters(recurse=False)):
            if whole.shape[0] != count or count % axis.size:
                raise TrainctlError(
                    f"{axis.size} expert ranks do not divide {pieces[whole].name}, of shape "
                    f"{list(whole.shape)}, by experts",
                    hint="parallelism.expert=1",
                )
            shard, shape = Shard.split(whole.shape, dim=0, index=axis.index, count=axis.size)
            empty = torch.empty(shape, dtype=whole.dtype, device="meta")
            part = nn.Parameter(empty, requires_grad=whole.requires_grad)
            cut[part] = replace(cut.pop(whole), shard=shard, is_expert=True)
            setattr(module, name, part)
        module.num_experts = count // axis.size
        module.expert_axis, module.tensor_axis = axis, mesh.tensor
        module.config._experts_implementation = EXCHANGED  # also beside adapters of experts
    return cut


def expert_parallel_forward(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of this rank's tokens, on the ranks that hold them.

    All ranks of the expert axis call this together, also those without tokens. Tensor ranks have
    the same tokens; each sends an equal part of them, and then all have the results of all.

    Args:
        self: transformers' module, with the experts of this rank only.
        hidden: (tokens, width).
        index: Experts of each token, among all of the layer, (tokens, experts per token).
        weights: Routing weights of the experts' outputs, (tokens, experts per token).

    Returns:
        (tokens, width).
    """
    tensor, tokens = self.tensor_axis, hidden.shape[0]
    if tensor.size == 1:
        return _exchanged_experts(self, hidden, index, weights)
    missing = -tokens % tensor.size
    hidden, index, weights = (F.pad(each, (0, 0, 0, missing)) for each in (hidden, index, weights))
    own = ScatterRows.apply(hidden, tensor)
    own_weights = ScatterRows.apply(weights, tensor)
    own = _exchanged_experts(self, own, split_for_rank(index, tensor, dim=0), own_weights)
    whole: torch.Tensor = GatherRows.apply(own, tensor)
    return whole[:tokens]


def _exchanged_experts(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' outputs of tokens that no other rank sends; see the caller."""
    axis, local = self.expert_axis, self.num_experts
    wanted = index.reshape(-1)
    order = torch.argsort(wanted, stable=True)  # by expert, and so by rank
    counts = torch.bincount(wanted, minlength=axis.size * local)
    alike = [local] * axis.size
    theirs = _exchange(counts, alike, alike, axis.group.group_name)
    # One synchronisation: the host must know how many rows travel.
    sent, received = torch.stack([counts, theirs]).view(2, axis.size, local).sum(2).tolist()
    group = axis.group.group_name
    rows = AllToAll.apply(hidden[order // index.shape[1]], sent, received, group)
    expert = torch.arange(local, device=rows.device).repeat(axis.size)
    expert = expert.repeat_interleave(theirs, output_size=rows.shape[0])
    # Given one expert per row, transformers' function sorts the rows, multiplies and sorts back.
    each = expert.unsqueeze(1)
    rows = grouped_mm_experts_forward(self, rows, each, torch.ones_like(each, dtype=rows.dtype))
    rows = AllToAll.apply(rows, received, sent, group)
    output = torch.empty_like(rows).index_copy(0, order, rows).view(*index.shape, -1)
    return (output * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


class AllToAll(torch.autograd.Function):
    """All-to-all of rows; the backward pass sends the gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: str
    ) -> torch.Tensor:
        ctx.how = received, sent, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, *ctx.how), None, None, None


@torch.library.custom_op("trainctl::exchange", mutates_args=())
def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    """Send rows to the other ranks of a group and return the received rows.

    It is a custom operator so that recomputation can keep its result (`SAVED_OPERATIONS`).
    """
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=_groups[group])
    return result
