"""Encode many texts in groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import function_of
from trainctl.config.schema import DataConfig
from trainctl.options.data import spec_of

AT_ONCE = 4 << 20
"""Characters tokenized together: enough work for every core, in little memory."""

T = TypeVar("T")


class Encoder(Protocol):
    """The part of a tokenizer that a store needs; see `trainctl.data.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text."""


@dataclass(frozen=True, slots=True)
class Separated:
    """An encoder that appends a separator text to each document."""

    encoder: Encoder
    separator: str
    """Separator text, encoded together with the document before it."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the encoder."""
        return self.encoder.vocab_size

    @property
    def end_of_document(self) -> int | None:
        """End-of-document id of the encoder; it follows the separator."""
        return self.encoder.end_of_document

    @property
    def fingerprint(self) -> str:
        """Fingerprint of encoder and separator."""
        return f"{self.encoder.fingerprint} {json.dumps(self.separator)}"

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text with the separator after it."""
        return self.encoder.encode_all([text + self.separator for text in texts])


def encoder_of(section: DataConfig, tokenizer: Encoder) -> Encoder:
    """Return the encoder of a source's documents.

    Raises:
        TrainctlError: The tokenizer lacks something that the source needs.
    """
    if stores_loss_mask(section):
        made: Encoder = function_of("data", section.kind, "encoder")(section, tokenizer)
        return made
    return Separated(tokenizer, section.separator) if section.separator else tokenizer


def stores_loss_mask(section: DataConfig) -> bool:
    """Return True if a source's ids carry loss marks (`data.loss_marks`)."""
    return section.factory is None and bool(spec_of(section).encoder)


def dtype_for(vocab_size: int) -> str:
    """Return the smallest numpy dtype for stored ids, little endian."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def encoded(
    texts: Iterable[tuple[T, str]], tokenizer: Encoder
) -> Iterator[tuple[T, str, npt.NDArray[np.int64]]]:
    """Yield each item with its text and ids, in order. The ids include the end-of-document id.

    Texts are encoded `AT_ONCE` characters at a time; a longer text is encoded alone.
    """
    end = tokenizer.end_of_document
    for together in _together(texts):
        ids_of_each = tokenizer.encode_all([text for _, text in together])
        for (what, text), ids in zip(together, ids_of_each, strict=True):
            yield what, text, ids if end is None else np.append(ids, end)


def _together(texts: Iterable[tuple[T, str]]) -> Iterator[list[tuple[T, str]]]:
    group: list[tuple[T, str]] = []
    size = 0
    for what, text in texts:
        group.append((what, text))
        size += len(text)
        if size >= AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group
