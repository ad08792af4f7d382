"""Many texts to ids, some at a time."""

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
"""Characters of text that are tokenized together: work for every core, and little memory."""

T = TypeVar("T")


class Encoder(Protocol):
    """What a store needs of a tokenizer; see `train.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of each text."""


@dataclass(frozen=True, slots=True)
class Separated:
    """An encoder that puts a text after each document."""

    encoder: Encoder
    """What gives the ids."""
    separator: str
    """The text; it is encoded with the document, as it stands there."""

    @property
    def vocab_size(self) -> int:
        """As the encoder has it."""
        return self.encoder.vocab_size

    @property
    def end_of_document(self) -> int | None:
        """As the encoder has it; it comes after the separator."""
        return self.encoder.end_of_document

    @property
    def fingerprint(self) -> str:
        """Of both."""
        return f"{self.encoder.fingerprint} {json.dumps(self.separator)}"

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of each text and the separator after it."""
        return self.encoder.encode_all([text + self.separator for text in texts])


def encoder_of(section: DataConfig, tokenizer: Encoder) -> Encoder:
    """What makes the ids of a source's documents.

    Raises:
        TrainctlError: The source needs something of the tokenizer that it does not have.
    """
    if marks_learnt(section):
        made: Encoder = function_of("data", section.kind, "encoder")(section, tokenizer)
        return made
    return Separated(tokenizer, section.separator) if section.separator else tokenizer


def marks_learnt(section: DataConfig) -> bool:
    """Whether the ids of a source say which of them are learnt (`data.marks`)."""
    return section.factory is None and bool(spec_of(section).encoder)


def dtype_for(vocab_size: int) -> str:
    """numpy name of the type that ids are written in: little endian, as small as it can be."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def encoded(
    texts: Iterable[tuple[T, str]], tokenizer: Encoder
) -> Iterator[tuple[T, str, npt.NDArray[np.int64]]]:
    """Yield each text with what came with it and its ids, its end among them, in the order of the
    texts.

    Args:
        texts: Each with anything that belongs to it.
        tokenizer: Gives the ids, `AT_ONCE` characters at a time; a longer text goes by itself.
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
