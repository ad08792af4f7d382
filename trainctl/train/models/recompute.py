"""Activation checkpointing: which blocks recompute their activations, and what is kept meanwhile.

torch's non-reentrant checkpoint does the recomputing (arXiv:1604.06174). Around it, hooks on saved
tensors decide where a block's input waits for the backward pass: on the device, in host memory, or
in slices on the tensor-parallel ranks. Inside it, `selective` keeps what is costly to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from trainctl.config.registry import function_of
from trainctl.config.schema import ActivationCheckpointingConfig
from trainctl.errors import TrainctlError
from trainctl.options.activation_checkpointing import Recomputing
from trainctl.plan.recompute import is_wrapped
from trainctl.train.models.model import blocks

KEPT_OPERATIONS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "transformers::grouped_mm_fallback",
        "trainctl::exchange",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Products with weights, and attention as one kernel: nearly all of a block's arithmetic; and what
experts on other ranks take and give. Batched products are not among them, since eager attention
makes its scores with those."""

_repeats: ContextVar[bool] = ContextVar("repeats", default=False)


def is_recomputing() -> bool:
    """Whether a block is being run for the second time, in the backward pass."""
    return _repeats.get()


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Those of a block's forward pass and of its recomputation."""


def wrap_blocks(
    model: nn.Module,
    config: ActivationCheckpointingConfig,
    tensor_group: dist.ProcessGroup | None = None,
) -> int:
    """Recompute every k-th decoder block in the backward pass; how many do.

    Args:
        model: Whole, also where pipeline stages are cut from it later.
        config: What is recomputed, and where inputs wait.
        tensor_group: Ranks that hold the same block inputs; needed to partition them.

    Raises:
        TrainctlError: The model has no block that can.
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
    partitions = config.partition_across_tensor_ranks
    assert tensor_group is not None or not partitions, "nothing to partition over"
    recompute = Recompute(
        contexts=function_of("activation_checkpointing", config.mode),
        offload=config.offload_to_cpu,
        group=tensor_group if partitions else None,
    )
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = is_wrapped(number, config)
        # `gradient_checkpointing_enable` wraps every block, and takes no function.
        layer._gradient_checkpointing_func = recompute
    return sum(layer.gradient_checkpointing for layer in layers)


@dataclass(frozen=True)
class Recompute:
    """What transformers calls to run a wrapped block: `recompute(forward, hidden, *others)`."""

    contexts: Contexts = noop_context_fn
    """Makes those of the first pass and of the one that repeats it; they say what is kept besides
    the input."""
    offload: bool = False
    """The input waits in host memory."""
    group: dist.ProcessGroup | None = None
    """The input waits in slices on these ranks, which all have it; None: whole."""
    inner: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Applied to the block's forward function, such as the compiler."""

    def __call__(self, forward: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:
        if self.inner is not None:
            forward = self.inner(forward)
        with self._where_it_waits(hidden):
            return checkpoint(
                forward,
                hidden,
                *others,
                use_reentrant=False,
                context_fn=self._both,
            )

    def _both(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = self.contexts()
        return first, _repeating(again)

    def _where_it_waits(self, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """Hooks for what the checkpoint itself saves: its inputs. Masks and the like, which all
        blocks share, stay where they are."""
        if not self.offload and self.group is None:
            return nullcontext()
        # Not the tensor itself: the hooks live as long as what they packed.
        address, shape = hidden.data_ptr(), hidden.shape

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Waiting:
            is_input = tensor.data_ptr() == address and tensor.shape == shape
            return _Waiting.of(tensor, self) if is_input else tensor

        def unpack(packed: torch.Tensor | _Waiting) -> torch.Tensor:
            return packed.back() if isinstance(packed, _Waiting) else packed

        return saved_tensors_hooks(pack, unpack)


@contextmanager
def _repeating(inside: AbstractContextManager[Any]) -> Iterator[None]:
    token = _repeats.set(True)
    try:
        with inside:
            yield
    finally:
        _repeats.reset(token)


@dataclass(frozen=True)
class _Waiting:
    """A block's input between its forward and its backward pass."""

    values: torch.Tensor
    shape: torch.Size
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, tensor: torch.Tensor, how: Recompute) -> _Waiting:
        values = tensor.detach()
        if how.group is not None:
            values = _own_slice(values, how.group)
        if how.offload and values.device.type != "cpu":
            # Both ways in the order of the stream: nothing waits for the copies.
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        return cls(values, tensor.shape, tensor.device, how.group)

    def back(self) -> torch.Tensor:
        """Return the whole input again; with a group all its ranks call this together."""
        values = self.values.to(self.device, non_blocking=True)
        if self.group is None:
            return values
        whole = values.new_empty(values.numel() * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(whole, values, group=self.group)
        return whole[: self.shape.numel()].view(self.shape)


def _own_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a copy of this rank's equal share of the elements; the last are padded with zeros."""
    size = -(-tensor.numel() // dist.get_world_size(group))
    part = tensor.reshape(-1)[size * dist.get_rank(group) :][:size]
    own = tensor.new_zeros(size)
    own[: part.numel()] = part
    return own


def keep_products() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of a block's forward pass and of its recomputation, of what `selective`
    keeps."""
    kept: deque[_Kept] = deque()
    return _Keep(kept), _GiveBack(kept)


@dataclass
class _Kept:
    operation: str
    output: Any


class _Keep(TorchDispatchMode):
    """Keeps the results of `KEPT_OPERATIONS`.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` does so too, but keeps a product
    that is later summed over ranks in place with the sum already in it, and the recomputation adds
    it up again: tensor-parallel gradients are then wrong, without a word. Here whatever writes to a
    kept tensor leaves a copy of it behind.
    """

    def __init__(self, kept: deque[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = {_storage(tensor) for tensor in _written(func, args, kwargs)}
        if written:
            self._copy(written)
        output = func(*args, **kwargs)
        if func.name() in KEPT_OPERATIONS:
            self._kept.append(_Kept(func.name(), _detached(output)))
        return output

    def _copy(self, written: set[int]) -> None:
        for item in self._kept:
            item.output = tree_map_only(
                torch.Tensor,
                lambda tensor: tensor.clone() if _storage(tensor) in written else tensor,
                item.output,
            )


class _GiveBack(TorchDispatchMode):
    """Gives what was kept in place of computing it again, in the same order."""

    def __init__(self, kept: deque[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.name() not in KEPT_OPERATIONS:
            return func(*args, **(kwargs or {}))
        if not self._kept or self._kept[0].operation != func.name():
            raise RuntimeError(f"{func.name()} was not called here in the forward pass")
        return self._kept.popleft().output


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation changes; of a collective all, for its schema does not
    say."""
    if getattr(func, "namespace", "") == "c10d":
        yield from _tensors((args, kwargs))
    # The type of what a dispatch mode is given, and its schema, have no public names.
    elif isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                yield from _tensors(given)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_detached = partial(tree_map_only, torch.Tensor, torch.Tensor.detach)
"""Other tensor objects on the same storage: autograd is about to write to the originals."""
