"""Tokens of samples, sliced from the text or taken from packed bins. No torch.

Tokens may be masked (Devlin et al. 2019, arXiv:1810.04805): some are hidden, and predicted. Whether
and how a token is hidden is a function of (seed, source, epoch, sample, position) alone. So it is
the same in every layout and after every resume, and another in the next epoch. Held-out samples
have the same hidden tokens in every evaluation and with every seed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import RunConfig
from trainctl.data.corpus import Corpus, Split
from trainctl.data.infilling import Infilling
from trainctl.data.packing import Bins
from trainctl.data.source_sampler import Words, derive_key, splitmix64, unit_interval
from trainctl.data.targets import Prompt, PromptRecords
from trainctl.data.tokenizer import begin_of_documents, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.options.objective.masked import MaskedConfig
from trainctl.options.tokenizer import tokenizer_facts
from trainctl.plans.mixture import samples_in, sources_of

_CHOICE, _KIND, _TOKEN = range(3)
"""Random numbers per position: whether it is hidden, by what, and by which random token."""


@dataclass(frozen=True, slots=True)
class TokenMasking:
    """Settings that hide tokens of a source's samples."""

    key: Words
    """Random key of the source, which depends on the seed."""
    rate: float
    mask_share: float
    random_share: float
    mask_token: int
    """Id that replaces hidden tokens."""
    kept_token: int | None
    """Id that is never hidden: it begins documents."""
    vocab_size: int
    """Exclusive upper bound of the ids that replace hidden tokens at random."""

    def apply(
        self,
        tokens: npt.NDArray[np.int64],
        can_hide: npt.NDArray[np.bool_],
        indices: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Hide tokens in place, and return where, (samples, length).

        Args:
            tokens: Ids, (samples, length).
            can_hide: Whether a token may be hidden, (samples, length).
            indices: Index of each sample in its split.
        """
        samples = derive_key(self.key, epochs, indices)[:, None]
        numbers = derive_key(samples, np.arange(tokens.shape[1])[None])
        if self.kept_token is not None:
            can_hide = can_hide & (tokens != self.kept_token)
        is_hidden = can_hide & (unit_interval(derive_key(numbers, _CHOICE)) < self.rate)
        kind = unit_interval(derive_key(numbers, _KIND))
        drawn = derive_key(numbers, _TOKEN) % np.uint64(self.vocab_size)
        is_random = is_hidden & (kind >= self.mask_share)
        is_random &= kind < self.mask_share + self.random_share
        tokens[is_hidden & (kind < self.mask_share)] = self.mask_token
        tokens[is_random] = drawn[is_random].astype(np.int64)
        return is_hidden


def token_masking(config: RunConfig, name: str, *, held_out: bool = False) -> TokenMasking | None:
    """Return the masking of a source's samples; None if the objective hides no tokens.

    Raises:
        TrainctlError: The tokenizer has no mask token.
    """
    section = config.objective
    if not isinstance(section, MaskedConfig):
        return None
    facts, mask = tokenizer_facts(config.tokenizer), section.mask_token
    source = sources_of(config.data).get(name, config.data)
    tokenizer = load_tokenizer(config.tokenizer)
    found = facts.mask_token if mask is None else tokenizer.id_of(mask)
    if found is None:
        raise TrainctlError(
            f"objective.mask_token={mask or 'null'}: the tokenizer has no such token",
            hint="the text of one of its tokens in objective.mask_token",
        )
    seed = f"{'held out' if held_out else config.training.seed}/{name}"
    digest = hashlib.sha256(seed.encode("utf-8", errors="surrogateescape")).digest()
    return TokenMasking(
        key=splitmix64(np.uint64(int.from_bytes(digest[:8], "little"))),
        rate=section.rate,
        mask_share=section.mask_share,
        random_share=section.random_share,
        mask_token=found,
        kept_token=next(iter(begin_of_documents(source, tokenizer)), None),
        vocab_size=facts.vocab_size,
    )


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A batch of samples of one length."""

    tokens: npt.NDArray[np.int64]
    """Ids of each sample and of the token that follows, (samples, length + 1)."""
    ends: npt.NDArray[np.bool_]
    """True for the last token of each document, (samples, length)."""
    ignored: npt.NDArray[np.bool_]
    """True where the label is ignored, (samples, length): padding, and the token before a token
    that is padding or has no loss.
    """
    hidden: npt.NDArray[np.int64]
    """Ids that were hidden in `tokens`, (samples, length); -1 where none was."""
    targets: npt.NDArray[np.float32]
    """Numbers beside each record, (samples, width), NaN where there is none; width 0 for texts."""

    @classmethod
    def empty(cls, count: int, length: int, target_width: int = 0) -> SampleBatch:
        """Allocate samples; `tokens` are uninitialized."""
        shape = (count, length)
        return cls(
            tokens=np.empty((count, length + 1), dtype=np.int64),
            ends=np.zeros(shape, dtype=bool),
            ignored=np.zeros(shape, dtype=bool),
            hidden=np.full(shape, -1, dtype=np.int64),
            targets=np.full((count, target_width), np.nan, dtype=np.float32),
        )

    def put(self, places: npt.NDArray[np.int64], others: SampleBatch) -> None:
        """Write other samples at these rows."""
        self.tokens[places] = others.tokens
        self.ends[places] = others.ends
        self.ignored[places] = others.ignored
        self.hidden[places] = others.hidden
        self.targets[places] = others.targets


class SampleReader:
    """Reader for samples of one length L in one split of a corpus.

    Without `bins`, sample i covers tokens [i L, i L + L] of the text, one more than L for the
    labels. Tokens left over at the end of the split are not used. With `bins` of best-fit packing,
    sample i is the pieces of bin i followed by padding. Each piece ends a document, or is as long
    as a sample, or is the prompt of the answer in the next piece. `infilling` rearranges documents
    as they are read, and `masking` hides tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: Split,
        length: int,
        *,
        bins: Bins | None = None,
        infilling: Infilling | None = None,
        masking: TokenMasking | None = None,
    ) -> None:
        self._tokens = corpus.tokens(split, in_order=False)
        self._loss_mask = corpus.loss_mask(split)
        self._ends = corpus.ends(split)
        self._targets = corpus.targets(split)
        self.target_width = split.target_width
        raw = corpus.records(split)
        self._records = PromptRecords(raw) if raw is not None else None
        self._end_of_document = corpus.end_of_document
        self._length = length
        self._bins = bins
        self._infilling, self._masking = infilling, masking
        # There are no bins if all conversations are left out.
        self.num_samples = samples_in(split.tokens, length) if bins is None else len(bins)

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return start and end of each piece of a sample in the text, without the last label."""
        if self._bins is None:
            return [(index * self._length, (index + 1) * self._length)]
        starts, lengths = self._bins.pieces(index)
        return [(start, start + size) for start, size in zip(starts, lengths, strict=True)]

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a sample, in a corpus of prompts."""
        assert self._records is not None
        ((start, end),) = self.pieces(index)
        document = int(np.searchsorted(self._ends, self._ends.dtype.type(start), side="right"))
        return self._records.prompt(document, self._tokens[start:end])

    def read(
        self, indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64] | None = None
    ) -> SampleBatch:
        """Return the samples at `indices`; a negative index reads sample 0.

        `epochs` has the epoch of each sample, which infilling and masking depend on; None is epoch
        0.
        """
        rows = SampleBatch.empty(len(indices), self._length, self.target_width)
        indices = np.maximum(indices, 0)
        epochs = np.zeros_like(indices) if epochs is None else epochs
        if self._bins is not None:
            for number, index in enumerate(indices.tolist()):
                self._read_bin(rows, number, index, int(epochs[number]))
        else:
            self._read_stretches(rows, indices, epochs)
        if self._masking is not None:
            inputs = rows.tokens[:, :-1]
            can_hide = ~rows.ends
            can_hide[:, 1:] &= ~rows.ignored[:, :-1]
            before = inputs.copy()
            is_hidden = self._masking.apply(inputs, can_hide, indices, epochs)
            rows.hidden[is_hidden] = before[is_hidden]
        return rows

    def _read_stretches(
        self, rows: SampleBatch, indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]
    ) -> None:
        """Read samples that follow each other in the text."""
        starts = indices * self._length
        for row, start, epoch in zip(rows.tokens, starts.tolist(), epochs, strict=True):
            # Slices: fancy indexing of all tokens takes more than twice as long.
            self._read_ids(row, start, int(epoch))
        for ignored, start in zip(rows.ignored, starts.tolist(), strict=True):
            self._mark_ignored(ignored, start)
        self._find_ends(rows, starts)

    def _read_ids(self, row: npt.NDArray[np.int64], start: int, epoch: int) -> None:
        row[:] = self._tokens[start : start + len(row)]
        if self._infilling is not None:
            self._infilling.apply(row, start, self._tokens, self._ends, epoch)

    def _read_bin(self, rows: SampleBatch, number: int, index: int, epoch: int) -> None:
        row, at = rows.tokens[number], 0
        for start, end in self.pieces(index):
            size = end - start
            place = np.searchsorted(self._ends, self._ends.dtype.type(end))
            is_whole = int(self._ends[place]) == end
            if size == self._length and not is_whole:  # the document goes on
                self._read_ids(row, start, epoch)
                self._mark_ignored(rows.ignored[number], start)
                return
            if self._targets is not None and not at:
                rows.targets[number] = self._targets[place]
            self._read_ids(row[at : at + size], start, epoch)
            self._mark_ignored(rows.ignored[number, at : at + size], start, is_whole=is_whole)
            at += size
            rows.ends[number, at - 1] = is_whole
        row[at:] = self._end_of_document or 0
        rows.ignored[number, at - 1 :] = True

    def _mark_ignored(
        self, ignored: npt.NDArray[np.bool_], start: int, *, is_whole: bool = False
    ) -> None:
        """Mark the tokens that precede tokens without a loss.

        `ignored` is the mask of consecutive tokens, the first at position `start` of the text. With
        `is_whole` a document ends with the last token, so that the next token is no label of it.
        """
        if self._loss_mask is not None:
            found = self._loss_mask[start + 1 : start + len(ignored) + 1]
            ignored[: len(found)] = ~found
            ignored[len(ignored) - is_whole :] = True

    def _find_ends(self, rows: SampleBatch, starts: npt.NDArray[np.int64]) -> None:
        """Mark the last token of each document."""
        bounds = np.stack([starts, starts + self._length]).astype(self._ends.dtype)
        firsts, lasts = np.searchsorted(self._ends, bounds, side="right")
        for row, start, first, last in zip(rows.ends, starts, firsts, lasts, strict=True):
            row[self._ends[first:last].astype(np.int64) - start - 1] = True
