"""Selective recomputation: which results a recomputed block keeps, and how it uses them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Factory of the contexts of a block's forward pass and of its recomputation."""


kept_attention: ContextVar[Callable[..., torch.Tensor]] = ContextVar("kept_attention")
"""While a block runs whose calls are kept: calls an attention kernel with its arguments behind the
tensors that it may save.
"""


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
