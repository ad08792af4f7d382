"""Key-value cache of answers that are generated side by side, each in a slot of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True)
class Window:
    """Part of the cache that a forward pass reads and writes.

    The last tokens of all answers are in one column, as under left padding, so every attention
    kernel and mask of transformers fits; a row's own tokens begin at a column of its own.
    """

    slots: int
    """Number of slots."""
    columns: int
    """Most tokens of a slot."""
    slot: int = 0
    """First slot of the pass."""
    rows: int = 0
    """Slots of the pass."""
    first: int = 0
    """First column that the pass reads."""
    end: int = 0
    """Column of the pass's first new token."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer: (slots, heads, columns, width), allocated once."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = self._window.slots, key_states.shape[1], self._window.columns
        # Zeros: attention multiplies what a mask hides by zero, so it must be finite.
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens, and return all that the pass reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        window = self._window
        after = window.end + key_states.shape[-2]
        slots = slice(window.slot, window.slot + window.rows)
        self.keys[slots, :, window.end : after] = key_states
        self.values[slots, :, window.end : after] = value_states
        return self.keys[slots, :, window.first : after], self.values[
            slots, :, window.first : after
        ]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.end - self._window.first

    def get_max_length(self) -> int:
        return self._window.columns


class SlotCache(Cache):
    """Cache of a model, in whose slots answers begin and end independently."""

    def __init__(self, window: Window) -> None:
        super().__init__(layer_class_to_replicate=partial(SlotLayer, window))  # type: ignore[arg-type]

    @property
    def _tensors(self) -> list[torch.Tensor]:
        # A layer that uses another layer's keys has none.
        return [t for layer in self.layers for t in (layer.keys, layer.values) if t is not None]

    def copy_slot(self, source: int, target: int) -> None:
        """Copy one slot's tokens to another slot."""
        for tensor in self._tensors:
            tensor[target] = tensor[source]

    def move(self, rows: int, columns: range, by: int) -> None:
        """Move the tokens in some columns of the first slots; a negative `by` moves them left."""
        for tensor in self._tensors:
            tokens = tensor[:rows, :, columns.start : columns.stop].clone()
            tensor[:rows, :, columns.start + by : columns.stop + by] = tokens
