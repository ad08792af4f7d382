"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): documents whose middle comes last.

A document is cut at two random places into prefix, middle and suffix, and is then read as

    PREFIX prefix SUFFIX suffix MIDDLE middle      (PSM), or
    PREFIX SUFFIX suffix MIDDLE prefix middle      (SPM, in the paper's second variant)

PREFIX, SUFFIX and MIDDLE are three sentinel tokens of the tokenizer. A document keeps its position
and length: its last three tokens before the end of the document make room for the sentinels. So
samples, packing and counts are those of the original text. The cuts are between tokens, not
characters, because a corpus has only ids.

The result for a document is a function of (seed, source, epoch, document) alone, and any range of
it is computed without the rest. So a document that two samples share is the same in both, in every
layout and after every resume. It is rearranged differently in the next epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import RunConfig
from trainctl.data.source_sampler import Words, derive_key, splitmix64, unit_interval
from trainctl.data.token_arrays import Tokens
from trainctl.data.tokenizer import Tokenizer, begin_of_documents, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.plans.mixture import sources_of

SENTINELS = 3
_RANDOM = 4
"""Random numbers per document: whether to rearrange, PSM or SPM, and the two cuts."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """Settings that rearrange the documents of a source."""

    key: Words
    """Random key of the source, which depends on the seed."""
    rate: float
    spm_rate: float
    """Fraction of rearranged documents in SPM form."""
    prefix: int
    middle: int
    suffix: int
    end_of_document: int | None
    """Id that closes a document and stays last; None if there is none."""
    begin_of_document: tuple[int, ...] = ()
    """Ids that begin a document and stay first."""

    def apply(
        self,
        row: npt.NDArray[np.int64],
        start: int,
        tokens: Tokens,
        ends: npt.NDArray[np.integer],
        epoch: int,
    ) -> None:
        """Rearrange the documents in a range of the text, in place.

        Args:
            row: Ids of the range, as the text has them.
            start: Position of the first id in the text.
            epoch: Epoch of the source, from 0.
        """
        if not len(row):
            return
        stop = start + len(row)
        bounds = np.array([start, stop - 1], dtype=ends.dtype)
        touched = np.searchsorted(ends, bounds, side="right").tolist()
        documents = np.arange(touched[0], min(touched[1] + 1, len(ends)))
        chosen = derive_key(self.key, np.int64(epoch), documents)
        numbers = np.stack([derive_key(chosen, n) for n in range(_RANDOM)], axis=1)
        for document, of_it in zip(documents.tolist(), numbers, strict=True):
            begin, end = int(ends[document - 1]) if document else 0, int(ends[document])
            if end > begin and unit_interval(of_it[0]) < self.rate:
                closed = int(tokens[end - 1 : end][0]) == self.end_of_document
                begun = begin + len(self.begin_of_document)
                if tuple(tokens[begin:begun].tolist()) == self.begin_of_document:
                    begin = begun
                at = begin
                for part in self.parts(end - begin - closed, of_it):
                    size = 1 if isinstance(part, int) else len(part)
                    low, high = max(at, start), min(at + size, stop)
                    if low < high:
                        to = slice(low - start, high - start)
                        if isinstance(part, int):
                            row[to] = part
                        else:
                            first = begin + part.start + low - at
                            row[to] = tokens[first : first + high - low]
                    at += size

    def parts(self, length: int, numbers: Words) -> tuple[int | range, ...]:
        """Return the rearranged document, as sentinel ids and ranges of its tokens.

        Args:
            length: Tokens of the document without its end.
            numbers: Random 64-bit numbers of the document, (4,).
        """
        kept = length - SENTINELS
        if kept < 1:
            return (range(length),)
        low, high = sorted(int(number) % (kept + 1) for number in numbers[2:])
        prefix, middle, suffix = range(low), range(low, high), range(high, kept)
        if unit_interval(numbers[1]) < self.spm_rate:
            return self.prefix, self.suffix, suffix, self.middle, prefix, middle
        return self.prefix, prefix, self.suffix, suffix, self.middle, middle


def infilling_settings(config: RunConfig, name: str) -> Infilling | None:
    """Return the fill-in-the-middle settings of a source; None if it does not use it."""
    section = sources_of(config.data)[name]
    if not section.fim_rate:
        return None
    tokenizer = load_tokenizer(config.tokenizer)
    key = "data" if not config.data.sources else f"data.sources.{name}"
    prefix, middle, suffix = (
        _sentinel_id(tokenizer, token, f"{key}.fim_tokens") for token in section.fim_tokens
    )
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    of_seed = splitmix64(np.uint64(config.training.seed))
    return Infilling(
        key=derive_key(of_seed, int.from_bytes(digest[:7], "little")),
        rate=section.fim_rate,
        spm_rate=section.fim_spm_rate,
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        end_of_document=tokenizer.end_of_document,
        begin_of_document=begin_of_documents(section, tokenizer),
    )


def _sentinel_id(tokenizer: Tokenizer, token: str, key: str) -> int:
    found = tokenizer.id_of(token)
    if found is None:
        raise TrainctlError(
            f"{key}: the tokenizer {tokenizer.file or 'of bytes'} has no token {token!r}",
            hint=f"the names that it has for prefix, middle and suffix, in this order, in {key}",
        )
    return found
