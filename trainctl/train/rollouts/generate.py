"""Generation of answers by the model in training, on the layout that it trains on.

Rows share a batch only for speed: a row that ends leaves its slot in the key-value cache to the
next one. The data ranks share the rows by their numbers, and all get all answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.cache_utils import Cache, CacheLayerMixin

from trainctl.engines.process import Process
from trainctl.engines.protocol import Engine
from trainctl.memory.rollout import SPARE_COLUMNS, RolloutSize, prefill_tokens
from trainctl.options.objective.grpo import GrpoConfig
from trainctl.plans.types import RunPlan
from trainctl.train.evaluation import inference
from trainctl.train.rollouts import Completion, RolloutRow, Sampler


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Settings of a rollout besides those of the sampler."""

    max_tokens: int
    """Most tokens of an answer."""
    batch_size: int
    """Most answers that a rank generates side by side."""
    prefill_tokens: int
    """Most tokens of prompts, padding included, in one forward pass; a longer prompt is alone."""
    ends: Collection[int]
    """Ids that end an answer."""
    vocab_size: int
    """Number of ids to draw from; logits beyond it pad the vocabulary."""
    holds_weights: bool = True
    """Whether each rank holds all weights whole until the rollout ends, where they are partitioned.
    Otherwise they are gathered for each token.
    """

    @classmethod
    def of(cls, plan: RunPlan, ends: Collection[int], vocab_size: int) -> Generation:
        """Return the settings of a run's rollouts, of the size that its memory budget counts."""
        section, size = plan.config.objective, RolloutSize.of(plan)
        assert isinstance(section, GrpoConfig)
        return cls(
            max_tokens=section.max_answer_tokens,
            batch_size=size.answers,
            prefill_tokens=prefill_tokens(plan, section),
            ends=ends,
            vocab_size=vocab_size,
            holds_weights=size.holds_weights,
        )


PASSES = 64
"""Forward passes between two times at which the ranks wait for each other, so that none of them is
silent for long.
"""


def generate(
    engine: Engine,
    process: Process,
    rows: Sequence[RolloutRow],
    sampler: Sampler,
    settings: Generation,
    keep: Callable[[RolloutRow, Completion], None] = lambda row, answer: None,
    beat: Callable[[str], None] = lambda doing: None,
) -> list[Completion]:
    """Return the answers of all rows, in their order; on all ranks together.

    Args:
        keep: Called with each answer as soon as it has ended, on the ranks that generate it: all
            ranks of a tensor group.
        beat: Called on all ranks every few seconds with what is being done.
    """
    data, tensor = engine.mesh.data, engine.mesh.tensor
    own = range(data.index, len(rows), data.size)
    batch = _Batch(engine, process, sampler, settings, keep, [rows[index] for index in own])
    held = settings.holds_weights
    # Decoding has another shape for each token, for which compiled blocks would compile again.
    with (
        inference(engine.module),
        torch.compiler.set_stance("force_eager"),
        engine.whole_weights() if held else nullcontext(),
    ):
        while process.any(batch.left > 0):
            beat(f"sampling, {batch.left:,} answers left")
            # Each pass gathers weights that are not held, so ranks that are done go on passing.
            for _ in range(PASSES if held else 1):
                if batch.left or not held:
                    batch.advance()
    completions = [each.completion() for each in batch.generated]
    found: list[Completion | None] = [None] * len(rows)
    told = (data.index, completions) if tensor.is_first else None
    for index, answers in filter(None, process.gather(told)):
        found[index :: data.size] = answers
    return [each for each in found if each is not None]


@dataclass(slots=True)
class _Answer:
    row: RolloutRow
    numbers: np.ndarray
    """Random number of each token."""
    start: int = 0
    """Column of the prompt's first token."""
    ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    is_finished: bool = False

    def completion(self) -> Completion:
        return Completion(
            np.array(self.ids, dtype=np.int64),
            np.array(self.log_probabilities, dtype=np.float32),
            self.is_finished,
        )


class _Batch:
    """Answers of this rank that are generated, and those that wait for a slot.

    Attributes:
        generated: All answers of this rank, in order.
    """

    def __init__(
        self,
        engine: Engine,
        process: Process,
        sampler: Sampler,
        settings: Generation,
        keep: Callable[[RolloutRow, Completion], None],
        rows: Sequence[RolloutRow],
    ) -> None:
        self._engine, self._process, self._keep = engine, process, keep
        self._sampler, self._settings = sampler, settings
        count = settings.max_tokens
        self.generated = [
            _Answer(row, sampler.numbers(row.number, row.sample, count)) for row in rows
        ]
        self._waiting = deque(self.generated)
        self._active: list[_Answer] = []
        """Answers in the first slots."""
        longest = max((len(row.prompt) for row in rows), default=1) + count
        slots = max(1, min(settings.batch_size, len(rows)))
        self._window = Window(slots, longest + SPARE_COLUMNS)
        self._cache = SlotCache(self._window)
        self._end = 0
        """Column of the next token."""

    @property
    def left(self) -> int:
        """Number of answers that have not ended."""
        return len(self._waiting) + len(self._active)

    def advance(self) -> None:
        """Make one forward pass: over prompts if a slot is free, else over each last token."""
        if self._waiting and len(self._active) < self._window.slots:
            new = self._admit()
            self._draw(new, self._forward([each.row.prompt for each in new], len(self._active)))
            self._active += new
            self._retire()
        elif self._active:
            self._make_room()
            logits = self._forward([each.ids[-1:] for each in self._active], 0)
            self._end += 1
            self._draw(self._active, logits)
            self._retire()
        else:
            self._end = 1
            self._forward([(0,)], 0)  # only to gather weights together with the other ranks

    def _admit(self) -> list[_Answer]:
        """Take the waiting answers that one pass over prompts can hold; set their columns."""
        new, longest = [self._waiting.popleft()], 0
        longest = len(new[0].row.prompt)
        while self._waiting and len(self._active) + len(new) < self._window.slots:
            longest = max(longest, len(self._waiting[0].row.prompt))
            if longest * (len(new) + 1) > self._settings.prefill_tokens:
                break
            new.append(self._waiting.popleft())
        longest = max(len(each.row.prompt) for each in new)
        if not self._active:
            self._end = longest
        elif longest > self._end:
            self._move(longest - self._end)
        for each in new:
            each.start = self._end - len(each.row.prompt)
        return new

    def _make_room(self) -> None:
        """Make sure that there is a column for the next token."""
        if self._end == self._window.columns:
            self._move(-min(each.start for each in self._active))

    def _move(self, by: int) -> None:
        first = min(each.start for each in self._active)
        self._cache.move(len(self._active), range(first, self._end), by)
        self._end += by
        for each in self._active:
            each.start += by

    def _forward(self, tokens: Sequence[Sequence[int]], slot: int) -> torch.Tensor:
        """Return the logits after the last token of each row, (rows, vocabulary).

        Args:
            tokens: New tokens of each row: a prompt, or the last one drawn.
            slot: Slot of the first row; the others follow.
        """
        count, longest = len(tokens), max(map(len, tokens))
        window = self._window
        window.slot, window.rows = slot, count
        is_decoding = slot < len(self._active)
        starts = torch.tensor(
            [each.start for each in self._active]
            if is_decoding
            else [self._end - len(each) for each in tokens]
        )
        window.end = self._end if is_decoding else self._end - longest
        window.first = int(starts.min())
        columns = torch.arange(window.first, window.end + longest)
        padded = [[0] * (longest - len(each)) + list(each) for each in tokens]
        inputs = {
            "input_ids": torch.tensor(padded),
            "attention_mask": (columns >= starts[:, None]).long(),
            "position_ids": (columns[-longest:] - starts[:, None]).clamp(min=0),
        }
        device = self._process.device
        logits: torch.Tensor = self._engine.module(
            {
                **{name: tensor.to(device) for name, tensor in inputs.items()},
                "past_key_values": self._cache,
                "use_cache": True,
                "logits_to_keep": 1,
            }
        )
        return logits[:, -1]

    def _draw(self, answers: Sequence[_Answer], logits: torch.Tensor) -> None:
        numbers = torch.tensor(
            [each.numbers[len(each.ids)] for each in answers], dtype=torch.float64
        )
        size = self._settings.vocab_size
        tokens, found = self._sampler.draw(logits, numbers.to(logits.device), size)
        tensor = self._engine.mesh.tensor
        if tensor.size > 1:  # all its ranks must go on with the same token, whatever they round
            dist.broadcast(tokens, tensor.ranks[0], group=tensor.group)
        drawn = zip(answers, tokens.tolist(), found.tolist(), strict=True)
        for each, token, log_probability in drawn:
            each.ids.append(token)
            each.log_probabilities.append(log_probability)
            each.is_finished = token in self._settings.ends

    def _retire(self) -> None:
        """Free the slots of answers that have ended; the last slots take their places."""
        active = self._active
        for slot in reversed(range(len(active))):
            each = active[slot]
            if each.is_finished or len(each.ids) == self._settings.max_tokens:
                self._keep(each.row, each.completion())
                last = active.pop()
                if last is not each:
                    self._cache.copy_slot(len(active), slot)
                    active[slot] = last
