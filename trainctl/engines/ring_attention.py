"""Ring attention: causal attention over sequences whose tokens are divided among context ranks.

Queries stay on their rank, and keys and values travel round the ring (arXiv:2310.01889). Every rank
merges the attention of its queries to one rank's keys after the other, by their log-sum-exp in
fp32. Of 2c chunks of a sequence, the i-th of c ranks has chunks i and 2c - 1 - i (`SequencePart`),
so causal attention costs all ranks the same. Chunks and documents are intervals of a sequence: what
a rank attends to is a list of rectangles, each without a mask or causal, for torch's fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainctl.engines.process import Axis

aten = torch.ops.aten


Place = tuple[slice, slice, slice]
"""Samples, heads and tokens of a tensor."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Queries of this rank and keys of one rank, of which the former attend to the latter."""

    queries: Place
    keys: Place
    is_causal: bool
    """Whether queries and keys are the same tokens; otherwise all keys precede all queries."""

    @property
    def is_of_documents(self) -> bool:
        """Return True if its shape depends on the documents of one sample."""
        samples, *_ = self.queries
        return samples != slice(None)

    @classmethod
    def of(cls, sample: int | None, queries: range, keys: range, *, is_causal: bool) -> Rectangle:
        """Return the rectangle of some tokens in a sample, or in all of them (None)."""
        samples = slice(None) if sample is None else slice(sample, sample + 1)
        first, second = (
            (samples, slice(None), slice(tokens.start, tokens.stop)) for tokens in (queries, keys)
        )
        return cls(first, second, is_causal)


Rectangles = tuple[tuple[Rectangle, ...], ...]
"""The rectangles of each turn of the ring: of the own keys, of those of the rank before, ..."""


def rectangles_of(
    rank: int, ranks: int, length: int, begins: torch.Tensor | None = None
) -> Rectangles:
    """Return the rectangles of a context rank.

    Args:
        length: Tokens of a whole sequence.
        begins: Whether each token is the first one of a document, (samples, length) on the host, if
            attention stays within documents; otherwise None.
    """
    documents = None if begins is None else begins.cumsum(dim=1)
    return tuple(
        tuple(_rectangles_between(rank, (rank - turn) % ranks, ranks, length, documents))
        for turn in range(ranks)
    )


def _rectangles_between(
    rank: int, other: int, ranks: int, length: int, documents: torch.Tensor | None
) -> Iterator[Rectangle]:
    """Yield the rectangles of one rank's queries and another's keys."""
    size, last = length // (2 * ranks), 2 * ranks - 1
    for at, chunk in ((0, rank), (size, last - rank)):
        for key_at, key_chunk in ((0, other), (size, last - other)):
            if key_chunk > chunk:
                continue
            make = partial(Rectangle.of, is_causal=key_chunk == chunk)
            if documents is None:
                yield make(None, range(at, at + size), range(key_at, key_at + size))
                continue
            for sample, row in enumerate(documents):
                chunks = row.split(size)
                if key_chunk == chunk:
                    yield from (make(sample, run, run) for run in _runs(chunks[chunk], at))
                elif chunks[chunk][0] == chunks[key_chunk][-1]:
                    # The one document that two chunks can share ends the earlier one.
                    *_, tail = _runs(chunks[key_chunk], key_at)
                    yield make(sample, next(_runs(chunks[chunk], at)), tail)


def _runs(chunk: torch.Tensor, at: int) -> Iterator[range]:
    """Yield the tokens of each document in a chunk whose first token has the index `at`."""
    _, counts = chunk.unique_consecutive(return_counts=True)
    ends = (counts.cumsum(0) + at).tolist()
    return map(range, [at, *ends], ends)


class Ring:
    """The context ranks of a sequence, and what this rank attends to in the current micro-batch.

    Attributes:
        rectangles: Set before each forward pass.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        self._axis, self._name = axis, name
        self.rectangles: Rectangles = ()
        _rings[name] = self

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to the keys of all ranks.

        Args:
            query: (samples, heads, tokens, width).
            key: (samples, key heads, tokens, width); the key heads divide the heads.
            value: As `key`.

        Returns:
            (samples, heads, tokens, width).
        """
        device = query.device.type
        if torch.is_autocast_enabled(device):
            format = torch.get_autocast_dtype(device)
            query, key, value = (each.to(format) for each in (query, key, value))
        return _RingAttention.apply(query, key, value, scale, self._name)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention and its log-sum-exp, (samples, heads, tokens) in fp32."""
        output = torch.zeros_like(query, dtype=torch.float32)
        sums = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        pair, last = torch.stack([key, value]), len(self.rectangles) - 1
        for turn, rectangles in enumerate(self.rectangles):
            coming = self._pass_on(pair) if turn < last else None
            for each in rectangles:
                here = each.queries
                key, value = (part[each.keys] for part in pair)
                found, of_block = _attend(each, query[here], key, value, scale)
                weight = torch.sigmoid(of_block - sums[here]).unsqueeze(-1)
                output[here].lerp_(found.float(), weight)
                sums[here] = torch.logaddexp(sums[here], of_block)
            if coming is not None:
                pair = coming.wait()
        return output.to(query.dtype), sums

    def backward(
        self,
        rectangles: Rectangles,
        gradient: torch.Tensor,
        saved: Sequence[torch.Tensor],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value.

        The gradients of keys and values travel with them, and one hop further, to their rank.

        Args:
            rectangles: Those of the forward pass.
            saved: Query, key, value, output and log-sum-exp.
        """
        query, key, value, output, sums = saved
        pair, last = torch.stack([key, value]), len(rectangles) - 1
        of_query = torch.zeros_like(query, dtype=torch.float32)
        of_pair: _Passing | None = None
        for turn, some in enumerate(rectangles):
            coming = self._pass_on(pair) if turn < last else None
            own = torch.zeros_like(pair, dtype=torch.float32)
            for each in some:
                _add_gradients(each, gradient, (query, *pair, output, sums), scale, of_query, *own)
            if of_pair is not None:
                own += of_pair.wait()
            # Without other ranks they are home; otherwise the last hop brings them there.
            of_pair = self._pass_on(own) if last else None
            if coming is not None:
                pair = coming.wait()
        of_key, of_value = own if of_pair is None else of_pair.wait()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

    def _pass_on(self, tensor: torch.Tensor) -> _Passing:
        """Begin to send a tensor to the next rank and to receive that of the rank before."""
        axis = self._axis
        received = torch.empty_like(tensor)
        after, before = (axis.ranks[(axis.index + step) % axis.size] for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, axis.group),
                dist.P2POp(dist.irecv, received, before, axis.group),
            ]
        )
        return _Passing(tensor, received, works)


class _Passing:
    """An exchange under way, which keeps its tensors until then and no longer."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, works: list[Any]) -> None:
        self._tensors, self._works = [sent, received], works

    def wait(self) -> torch.Tensor:
        while self._works:  # they keep the tensors too
            self._works.pop().wait()
        received = self._tensors.pop()
        self._tensors.clear()
        return received


_rings: dict[str, Ring] = {}
"""Rings of this process, by name: a custom operator takes no object."""


@torch.library.custom_op("trainctl::ring_attention", mutates_args=())
def _ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, ring: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp; an operator, so that recomputation can keep its results."""
    return _rings[ring].forward(query, key, value, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        ring: str,
    ) -> torch.Tensor:
        output, sums = _ring_attention(query, key, value, scale, ring)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.how = _rings[ring], _rings[ring].rectangles, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ring, rectangles, scale = ctx.how
        return *ring.backward(rectangles, gradient, ctx.saved_tensors, scale), None, None


def _attend(
    rectangle: Rectangle,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention inside a rectangle and its log-sum-exp, by torch's fused kernel."""
    causal = rectangle.is_causal
    if _is_for_cudnn(rectangle, query, key, value):
        attend = aten._scaled_dot_product_cudnn_attention
        output, sums, *_ = attend(query, key, value, None, True, 0.0, causal, scale=scale)
        return output, sums.view(query.shape[:-1])
    attend = aten._scaled_dot_product_flash_attention
    if query.device.type == "cpu":
        attend = aten._scaled_dot_product_flash_attention_for_cpu
    output, sums, *_ = attend(query, key, value, 0.0, causal, scale=scale)
    return output, sums


def _is_for_cudnn(
    rectangle: Rectangle, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Return whether cuDNN's kernel is the faster one: from Hopper on, twice as fast as torch's.

    It takes 0.17 s to prepare for a shape, so it serves rectangles that are the same in every
    micro-batch.
    """
    if rectangle.is_of_documents or query.device.type == "cpu":
        return False
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, rectangle.is_causal, True)
    is_hopper = torch.cuda.get_device_capability(query.device) >= (9, 0)
    return is_hopper and torch.backends.cuda.can_use_cudnn_attention(asked)


def _add_gradients(
    rectangle: Rectangle,
    gradient: torch.Tensor,
    saved: Sequence[torch.Tensor],
    scale: float,
    *totals: torch.Tensor,
) -> None:
    """Add a rectangle's gradients of query, key and value to `totals`."""
    here, there = rectangle.queries, rectangle.keys
    places = here, there, there
    inputs = [each[place] for each, place in zip(saved, (*places, here, here), strict=True)]
    found = _attend_backward(rectangle, [gradient[here], *inputs], scale)
    for total, place, part in zip(totals, places, found, strict=True):
        total[place] += part


def _attend_backward(
    rectangle: Rectangle, inputs: Sequence[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rectangle's part of the gradients of query, key and value.

    Args:
        inputs: The output's gradient, query, key and value of the rectangle; output and log-sum-exp
            of the whole attention, with which the kernel computes its probabilities again.
    """
    *given, sums = inputs
    causal, sums = rectangle.is_causal, sums.contiguous()
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if sums.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, sums, 0.0, causal, scale=scale
        )
        return found
    # Neither bounds of packed samples, nor random numbers: there is no dropout.
    _, query, key, value, _ = given
    no_bounds, lengths = (None, None), (query.shape[2], key.shape[2])
    if _is_for_cudnn(rectangle, query, key, value):
        no_random = torch.zeros((), dtype=torch.int64, device=sums.device)
        found = aten._scaled_dot_product_cudnn_attention_backward(
            *given,
            sums.unsqueeze(-1),
            no_random,
            no_random,
            None,
            *no_bounds,
            *lengths,
            0.0,
            causal,
            scale=scale,
        )
        return found
    no_random = torch.empty(2, dtype=torch.uint64, device=sums.device)
    found = aten._scaled_dot_product_flash_attention_backward(
        *given,
        sums,
        *no_bounds,
        *lengths,
        0.0,
        causal,
        no_random,
        no_random,
        scale=scale,
    )
    return found
