"""Results that `selective` keeps of a block whose products are those of linear layers.

Torch's functions are replaced while such a block runs. So nothing is called at its other
operations, unlike under the modes of `selective`, which look at each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainctl.train.adapters.layers import LoraLinear
from trainctl.train.adapters.quantized import LoraQuantized, QuantizedLinear
from trainctl.train.models.recompute_frame import RecomputeFrame
from trainctl.train.models.selective import kept_attention, selective_dispatch_modes
from trainctl.train.models.varlen import VARLEN

_linear = torch._C._nn.linear
"""The product itself. ZeRO 3 replaces `F.linear` by a function in Python that saves the whole
weight in a form that it can release. A recomputed block saves none before its recomputation.
"""

_LINEAR = (nn.Linear, LoraLinear, QuantizedLinear, LoraQuantized)
"""Layers with no other product than `F.linear`, whose result no collective changes in place."""

Tensors = tuple[torch.Tensor, ...]

_is_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def has_plain_products(block: nn.Module) -> bool:
    """Return True if the products of a transformers block are linear layers and attention."""
    if block not in _is_plain:
        _is_plain[block] = _finds_plain_products(block)
    return _is_plain[block]


def _finds_plain_products(block: nn.Module) -> bool:
    for module in block.modules():
        # A gathered parameter of ZeRO 3 has its shape; a partitioned one is empty.
        shapes = (getattr(each, "ds_shape", each.shape) for each in module.parameters(False))
        if any(len(shape) > 1 for shape in shapes) and type(module) not in _LINEAR:
            return False
        name = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
        attention = ALL_ATTENTION_FUNCTIONS.get(name)
        if name not in ("eager", VARLEN) and attention is not sdpa_attention_forward:
            return False
    return True


def kept_calls(frame: RecomputeFrame) -> tuple[AbstractContextManager[Any], ...]:
    """Return the contexts of forward pass and recomputation of a block with plain products."""
    kept: deque[_Kept | AbstractContextManager[Any]] = deque()
    operations = selective_dispatch_modes()
    return _Saving(frame, kept, operations), _Replaying(frame, kept, operations)


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that autograd saves of a call: one that the call was given or gave, in a shape."""

    index: int
    """Number of the tensor."""
    given_strides: tuple[int, ...]
    geometry: tuple[Sequence[int], Sequence[int]]


@dataclass(slots=True)
class _Kept:
    output: torch.Tensor
    version: int
    requires_grad: bool
    saved: list[_View | torch.Tensor]


_AGAIN: AbstractContextManager[None] = nullcontext()
"""Context in which a call is made again whose result is not kept."""


class _Calls:
    """Context in which `F.linear` and `F.scaled_dot_product_attention` are methods of this."""

    def __init__(
        self,
        frame: RecomputeFrame,
        kept: deque[_Kept | AbstractContextManager[Any]],
        operations: tuple[TorchDispatchMode, TorchDispatchMode],
    ) -> None:
        # The frame leads to the context of its recomputation: a cycle would outlive the step.
        self._frame: RecomputeFrame = proxy(frame)
        self._kept, self._operations = kept, operations

    def __enter__(self) -> None:
        self._functions = F.linear, F.scaled_dot_product_attention
        self._token = kept_attention.set(self.attend)
        F.linear = self._linear  # type: ignore[assignment]
        F.scaled_dot_product_attention = self._sdpa  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        F.linear, F.scaled_dot_product_attention = self._functions
        kept_attention.reset(self._token)

    def attend(
        self, function: Callable[..., torch.Tensor], given: Tensors, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return an attention kernel's result, or that of the forward pass."""
        return self._result(function, given, *args, **kwargs)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._result(_linear, (input, weight), input, weight, bias)

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        call = self._functions[1]
        return self.attend(call, given, query, key, value, attn_mask, *args, **kwargs)

    def _result(
        self, function: Callable[..., torch.Tensor], given: Tensors, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the result of a call."""
        raise NotImplementedError


class _Saving(_Calls):
    """Calls of the forward pass."""

    is_composite = False
    """Whether attention is several kernels here: operations choose which results are kept."""

    def attend(
        self, function: Callable[..., torch.Tensor], given: Tensors, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not _Saving.is_composite:
            output = self._result(function, given, *args, **kwargs)
            _Saving.is_composite = not isinstance(self._kept[-1], _Kept)
            return output
        self._kept.append(self._operations[1])
        with self._operations[0]:
            return function(*args, **kwargs)

    def _result(
        self, function: Callable[..., torch.Tensor], given: Tensors, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        recent: list[torch.Tensor] = []
        self._frame.recent = recent
        output = function(*args, **kwargs)
        self._frame.recent = None
        tensors = (*given, output)
        saved = [_view_of(each, tensors) for each in recent]
        # One kernel saves a number for each row beside its result; several, their results.
        more = sum(each.numel() for each in saved if isinstance(each, torch.Tensor))
        if more < output.numel():
            version, has_gradient = output._version, output.requires_grad
            self._kept.append(_Kept(output.detach(), version, has_gradient, saved))
        else:
            self._kept.append(_AGAIN)
        return output

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # One that a later operation changed in place is computed again.
        for index, each in enumerate(self._kept):
            if isinstance(each, _Kept) and each.output._version != each.version:
                self._kept[index] = _AGAIN


class _Replaying(_Calls):
    """Calls of the recomputation."""

    def _result(
        self, function: Callable[..., torch.Tensor], given: Tensors, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        kept = self._kept.popleft()
        if not isinstance(kept, _Kept):
            with kept:
                return function(*args, **kwargs)
        tensors = [*(each.detach() for each in given), kept.output]
        views = (each for each in kept.saved if isinstance(each, _View))
        if any(tensors[view.index].stride() != view.given_strides for view in views):
            return function(*args, **kwargs)
        for each in kept.saved:
            is_view = isinstance(each, _View)
            self._frame.put(tensors[each.index].as_strided(*each.geometry) if is_view else each)
        return kept.output.requires_grad_(kept.requires_grad)


def _view_of(saved: torch.Tensor, tensors: Tensors) -> _View | torch.Tensor:
    """Return the view of one of a call's tensors that a saved tensor is, or that tensor."""
    for index, given in enumerate(tensors):
        if saved.data_ptr() == given.data_ptr() and saved.dtype == given.dtype:
            return _View(index, given.stride(), (saved.shape, saved.stride()))
    return saved.detach()
