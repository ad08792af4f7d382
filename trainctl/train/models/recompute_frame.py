"""One recomputed call: its inputs stay; what autograd saves of it is computed again when needed.

`torch.utils.checkpoint` does the same without reentrant autograd. It spends 30 to 60 µs of Python
on each saved tensor, of which a block has about 50: more than its kernels take on a fast GPU.
Here, a saved tensor is an index until the first one is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.random import fork_rng
from torch.utils.checkpoint import get_device_states, set_device_states


class _Complete(Exception):
    """Every saved tensor is there: the rest of the call is not needed."""


class RecomputeFrame:
    """Tensors that autograd saves of a call, in their order."""

    def __init__(self, again: Callable[[], Any], device: torch.device) -> None:
        """Make a frame for one forward pass.

        Args:
            again: Repeats the call. It must hold the inputs without their history.
        """
        self._again = again
        self._device = device
        self._states = _random_states(device)
        self.is_cast = torch.is_autocast_enabled(device.type)
        self._autocast = torch.get_autocast_dtype(device.type)
        self._tensors: list[torch.Tensor | None] = []
        self.shapes: list[torch.Size] = []
        self.recent: list[torch.Tensor] | None = None
        """If a list, receives what the forward pass saves next."""

    def run(self, forward: Callable[[], Any], context: AbstractContextManager[Any]) -> Any:
        """Make the call within a context; return its result."""
        with saved_tensors_hooks(self._pack, self._unpack), context:
            output = forward()
        if _are_equal(self._states, _random_states(self._device)):
            self._states = []
        return output

    def put(self, tensor: torch.Tensor) -> None:
        """Add the next tensor in the recomputation.

        Raises:
            RuntimeError: The forward pass saved another tensor here.
        """
        tensors = self._tensors
        count = len(tensors)
        if count == len(self.shapes) or tensor.shape != self.shapes[count]:
            raise RuntimeError(
                f"a recomputed block saves a tensor of {tuple(tensor.shape)} as number {count}, "
                f"unlike its forward pass ({len(self.shapes)} tensors)"
            )
        tensors.append(tensor.detach() if tensor.requires_grad else tensor)
        if count + 1 == len(self.shapes):
            raise _Complete

    def _pack(self, tensor: torch.Tensor) -> int:
        self.shapes.append(tensor.shape)
        if self.recent is not None:
            self.recent.append(tensor)
        return len(self.shapes) - 1

    def _unpack(self, index: int) -> torch.Tensor:
        tensors = self._tensors
        found = tensors[index] if index < len(tensors) else None
        if found is None:  # nothing is computed yet, or this one is used a second time
            self._recompute()
            found = self._tensors[index]
            assert found is not None
        self._tensors[index] = None
        return found

    def _pack_again(self, tensor: torch.Tensor) -> int:
        self.put(tensor)
        return len(self._tensors) - 1

    def _peek(self, index: int) -> torch.Tensor:
        found = self._tensors[index]
        assert found is not None
        return found

    def _recompute(self) -> None:
        self._tensors = []
        try:
            with (
                saved_tensors_hooks(self._pack_again, self._peek),
                torch.enable_grad(),
                self._settings(),
            ):
                self._again()
        except _Complete:
            return
        raise RuntimeError(
            f"a recomputed block saves {len(self._tensors)} tensors, its forward pass "
            f"{len(self.shapes)}"
        )

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Set autocast and the generators' states as in the forward pass."""
        kind, states = self._device.type, self._states
        devices = [self._device.index or 0] if states[1:] else []
        with ExitStack() as stack:
            if self.is_cast:
                stack.enter_context(torch.autocast(kind, self._autocast))
            if states:
                stack.enter_context(fork_rng(devices, device_type=kind))
                torch.set_rng_state(states[0])
                set_device_states(devices, states[1:], device_type=kind)
            yield


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that a call on a device may draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        _, own = get_device_states(torch.empty(0, device=device))
        states += own
    return states


def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
