"""Activation checkpointing: which blocks are recomputed, and where their inputs wait.

Recomputation is torch's non-reentrant checkpoint (arXiv:1604.06174). Hooks on saved tensors decide
where a block's input waits for the backward pass: on the device, in host memory, or in slices on
the tensor-parallel ranks. Mode `selective` also keeps the results that are costly to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from trainctl.config.registry import function_of
from trainctl.config.schema import ActivationCheckpointingConfig
from trainctl.errors import TrainctlError
from trainctl.options.activation_checkpointing import Recomputing
from trainctl.plans.settings import is_recomputed
from trainctl.train.models.model import blocks

SAVED_OPERATIONS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "transformers::grouped_mm_fallback",
        "trainctl::exchange",
        "trainctl::ring_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results `selective` keeps: products with weights and fused attention, nearly all
of a block's arithmetic, and the token exchange of expert parallelism. Batched products are not
kept, since eager attention computes its scores with them.
"""

_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm"})
_WATCHED = _PRODUCTS | frozenset(
    [
        "__rmatmul__",
        "addmm",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
        "_scaled_mm",
        "scaled_mm",
        "_grouped_mm",
        "grouped_mm",
        "__setitem__",
    ]
)
"""Names of torch's functions that call `SAVED_OPERATIONS`, or write to a tensor without a sign of
it in their name. Another function that calls them only has its results computed again.
"""

_repeats: ContextVar[bool] = ContextVar("repeats", default=False)


def is_recomputing() -> bool:
    """Whether a block is being recomputed, in the backward pass."""
    return _repeats.get()


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Factory of the contexts of a block's forward pass and of its recomputation."""


def wrap_blocks(
    model: nn.Module,
    config: ActivationCheckpointingConfig,
    tensor_group: dist.ProcessGroup | None = None,
) -> int:
    """Let every k-th decoder block be recomputed in the backward pass; return their number.

    Args:
        model: The whole model, before pipeline stages are cut from it.
        tensor_group: Ranks that hold the same block inputs; needed to partition the inputs.

    Raises:
        TrainctlError: No block of the model supports recomputation.
    """
    if not isinstance(config, Recomputing):
        return 0
    layers = blocks(model)
    if not layers:
        raise TrainctlError(
            f"activation_checkpointing.mode={config.mode}, but {type(model).__name__} has no "
            "block that can be recomputed: 0 are wrapped",
            hint="activation_checkpointing=none, or a model whose blocks support it",
        )
    contexts = function_of("activation_checkpointing", config.mode)
    if contexts is selective_dispatch_modes and type(model).__module__.startswith("transformers."):
        contexts = selective_function_modes
    partitions = config.partition_across_tensor_ranks
    assert tensor_group is not None or not partitions, "nothing to partition over"
    recompute = Recompute(
        contexts=contexts,
        offload=config.offload_to_cpu,
        group=tensor_group if partitions else None,
    )
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = is_recomputed(number, config)
        # `gradient_checkpointing_enable` wraps every block, and takes no function.
        layer._gradient_checkpointing_func = recompute
    return sum(layer.gradient_checkpointing for layer in layers)


@dataclass(frozen=True)
class Recompute:
    """Checkpoint function of a wrapped block.

    transformers calls it as `recompute(forward, hidden, *others)`.
    """

    contexts: Contexts = noop_context_fn
    """Makes the contexts of forward pass and recomputation, which keep further results."""
    offload: bool = False
    """Whether the input waits in host memory."""
    group: dist.ProcessGroup | None = None
    """Ranks with the same input, on which it waits in slices; None keeps it whole."""
    inner: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Wrapper of the block's forward function, such as the compiler."""
    outer: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Wrapper of the block's forward function that is its checkpoint too."""

    def __call__(self, forward: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:
        if self.inner is not None:
            forward = self.inner(forward)
        with self._input_hooks(hidden):
            if self.outer is not None:
                return self.outer(forward)(hidden, *others)
            return checkpoint(
                forward,
                hidden,
                *others,
                use_reentrant=False,
                context_fn=self._context_pair,
            )

    def _context_pair(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = self.contexts()
        return first, _mark_recomputing(again)

    def _input_hooks(self, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """Return hooks that offload or slice the block's input.

        Other tensors that the checkpoint saves, such as a mask, are shared by all blocks and
        stay where they are.
        """
        if not self.offload and self.group is None:
            return nullcontext()
        # Do not capture the tensor: the hooks live as long as what they packed.
        address, shape = hidden.data_ptr(), hidden.shape

        def pack(tensor: torch.Tensor) -> torch.Tensor | _StoredInput:
            is_input = tensor.data_ptr() == address and tensor.shape == shape
            return _StoredInput.of(tensor, self) if is_input else tensor

        def unpack(packed: torch.Tensor | _StoredInput) -> torch.Tensor:
            return packed.back() if isinstance(packed, _StoredInput) else packed

        return saved_tensors_hooks(pack, unpack)


@contextmanager
def _mark_recomputing(inside: AbstractContextManager[Any]) -> Iterator[None]:
    token = _repeats.set(True)
    try:
        with inside:
            yield
    finally:
        _repeats.reset(token)


@dataclass(frozen=True)
class _StoredInput:
    """A block's input between its forward and its backward pass."""

    values: torch.Tensor
    shape: torch.Size
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, tensor: torch.Tensor, how: Recompute) -> _StoredInput:
        values = tensor.detach()
        if how.group is not None:
            values = _own_slice(values, how.group)
        if how.offload and values.device.type != "cpu":
            # The stream orders the copies of both directions: nothing waits for them.
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        return cls(values, tensor.shape, tensor.device, how.group)

    def back(self) -> torch.Tensor:
        """Return the whole input on its device; with a group, all its ranks call this together."""
        values = self.values.to(self.device, non_blocking=True)
        if self.group is None:
            return values
        whole = values.new_empty(values.numel() * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(whole, values, group=self.group)
        return whole[: self.shape.numel()].view(self.shape)


def _own_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a copy of this rank's equal share of the elements, flat and zero-padded."""
    size = -(-tensor.numel() // dist.get_world_size(group))
    part = tensor.reshape(-1)[size * dist.get_rank(group) :][:size]
    own = tensor.new_zeros(size)
    own[: part.numel()] = part
    return own


def selective_dispatch_modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the dispatch modes of forward pass and recomputation under `selective`."""
    kept: deque[_SavedOutput] = deque()
    return _SaveOutputs(kept), _ReplaySaved(kept)


def selective_function_modes() -> tuple[TorchFunctionMode, TorchFunctionMode]:
    """Return the same modes, entered only for calls that may keep or change a kept result.

    A mode for operations costs 10 to 30 µs in Python for each operation of a block. One for calls
    of torch's functions costs 1 or 2, but does not see the collectives of torch.distributed.
    Blocks of transformers and trainctl's layers change no product by these; a user's module may.
    """
    first, again = selective_dispatch_modes()
    return _WatchedCalls(first), _WatchedCalls(again)


class _WatchedCalls(TorchFunctionMode):
    """Function mode that enters a dispatch mode for watched calls."""

    def __init__(self, operations: _KeepingMode) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (_is_watched(func) or "out" in kwargs):
            return func(*args, **kwargs)
        # Without autograd, inside DeepSpeed's function of a linear layer, a product is one result.
        is_product = func.__name__ in _PRODUCTS and len(args) > 1 and args[1].dim() == 2
        if is_product and not torch.is_grad_enabled():
            return self._operations.result(func.__name__, partial(func, *args, **kwargs))
        with self._operations:
            return func(*args, **kwargs)


@cache
def _is_watched(function: Any) -> bool:
    """Return True if a function of torch may make a result that is kept, or change one in place."""
    name = getattr(function, "__name__", "")
    if isinstance(function, OpOverload | OpOverloadPacket) or name in _WATCHED:
        return True
    arguments = getattr(getattr(function, "__code__", None), "co_varnames", ())
    is_special = name.startswith("__")
    return name[:3] == "__i" if is_special else name.endswith("_") or "inplace" in arguments


def compiled_selection() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of `selective` in a graph: the compiler keeps what they mark."""
    return create_selective_checkpoint_contexts(_keep_or_recompute)


def _keep_or_recompute(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = operation.name() in SAVED_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass
class _SavedOutput:
    operation: str
    output: Any


class _KeepingMode(TorchDispatchMode):
    """Dispatch mode with the results that are kept between forward pass and recomputation."""

    def __init__(self, kept: deque[_SavedOutput]) -> None:
        super().__init__()
        self._kept = kept

    def result(self, operation: str, compute: Callable[[], Any]) -> Any:
        """Return the result of an operation that is kept."""
        raise NotImplementedError


class _SaveOutputs(_KeepingMode):
    """Dispatch mode that keeps the results of `SAVED_OPERATIONS`.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` keeps such results too. But a
    product that is then summed over ranks in place is kept there with the sum in it, and the
    recomputation sums it again: tensor-parallel gradients are silently wrong. Here, an
    operation that writes to a kept tensor leaves a copy of it behind.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = set[int]()
        if _may_write(func):
            written = {_storage_address(tensor) for tensor in _changed_tensors(func, args, kwargs)}
        for item in self._kept if written else ():
            item.output = tree_map_only(
                torch.Tensor,
                lambda tensor: tensor.clone() if _storage_address(tensor) in written else tensor,
                item.output,
            )
        if func.name() in SAVED_OPERATIONS:
            return self.result(func.name(), partial(func, *args, **kwargs))
        return func(*args, **kwargs)

    def result(self, operation: str, compute: Callable[[], Any]) -> Any:
        output = compute()
        # New tensor objects on the same storage: autograd is about to write to these.
        detached = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        self._kept.append(_SavedOutput(operation, detached))
        return output


class _ReplaySaved(_KeepingMode):
    """Dispatch mode that returns the kept results, in order, in place of computing them again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() not in SAVED_OPERATIONS:
            return func(*args, **(kwargs or {}))
        return self.result(func.name(), partial(func, *args, **(kwargs or {})))

    def result(self, operation: str, compute: Callable[[], Any]) -> Any:
        if not self._kept or self._kept[0].operation != operation:
            raise RuntimeError(f"{operation} was not called here in the forward pass")
        return self._kept.popleft().output


@cache
def _may_write(func: Any) -> bool:
    """Return True if an operation may change a tensor that it is given."""
    is_mutable = isinstance(func, OpOverload) and func._schema.is_mutable
    return is_mutable or getattr(func, "namespace", "") == "c10d"


def _changed_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation changes. A collective yields all its tensors, since its
    schema does not say which ones it changes.
    """
    if getattr(func, "namespace", "") == "c10d":
        yield from _tensor_leaves((args, kwargs))
    else:  # OpOverload and its schema have no public names
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                yield from _tensor_leaves(given)


def _tensor_leaves(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
