"""Activation checkpointing: which blocks are recomputed, and where their inputs wait.

A block's input waits for the backward pass (arXiv:1604.06174): on the device, in host memory, or
in slices on the tensor-parallel ranks. Mode `selective` also keeps the results that are costly to
compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import noop_context_fn

from trainctl.config.registry import function_of
from trainctl.config.schema import ActivationCheckpointingConfig
from trainctl.errors import TrainctlError
from trainctl.options.activation_checkpointing import Recomputing
from trainctl.plans.settings import is_recomputed
from trainctl.train.models.kept_calls import has_plain_products, kept_calls
from trainctl.train.models.model import blocks
from trainctl.train.models.recompute_frame import RecomputeFrame
from trainctl.train.models.selective import (
    Contexts,
    selective_dispatch_modes,
    selective_function_modes,
)

_repeats: ContextVar[bool] = ContextVar("repeats", default=False)


def is_recomputing() -> bool:
    """Whether a block is being recomputed, in the backward pass."""
    return _repeats.get()


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
        if self.outer is not None:
            with self._input_hooks(hidden):
                return self.outer(forward)(hidden, *others)
        if not torch.is_grad_enabled():
            return forward(hidden, *others)
        call = forward if self.inner is None else self.inner(forward)
        waiting = self._wait(hidden)
        has_gradient = hidden.requires_grad

        def repeat() -> None:
            with _mark_recomputing(replay):
                call(waiting().requires_grad_(has_gradient), *others)

        frame = RecomputeFrame(repeat, hidden.device)
        first, replay = self._contexts(forward, frame)
        return frame.run(partial(call, hidden, *others), first)

    def _contexts(
        self, forward: Callable[..., Any], frame: RecomputeFrame
    ) -> tuple[AbstractContextManager[Any], ...]:
        if self.contexts is selective_function_modes and isinstance(forward, partial):
            block = forward.args[0]
            if has_plain_products(block) and not frame.is_cast:
                return kept_calls(frame)
        return self.contexts()

    def _wait(self, hidden: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the function that gives the block's input in the backward pass."""
        if self.offload or self.group is not None:
            return _StoredInput.of(hidden, self).back
        detached = hidden.detach()
        version = detached._version

        def unchanged() -> torch.Tensor:
            if detached._version != version:
                raise RuntimeError("the input of a recomputed block was changed in place")
            return detached

        return unchanged

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
