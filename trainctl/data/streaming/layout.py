"""How a corpus lies elsewhere: shards of equally many tokens, and a record that is written last.

| under the corpus's URL | |
|---|---|
| `stream.json` | the record of the corpus, the tokenizer, and each shard's size and CRC-32 |
| `DIGEST/SIDE-NUMBER.shard` | ends of documents, u32 each, then the ids, little endian |

Shard k of S tokens has the ids from k S on, S of them and the next one, which is the label of the
last; and the documents that end behind k S and up to (k + 1) S, counted from k S.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.in_place import Tokens
from trainctl.errors import ExitCode, TrainctlError

RECORD = "stream.json"
FORMAT = 1
END = np.dtype("<u4")
SIDES = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One shard."""

    documents: int
    """Documents that end in it."""
    size: int
    """Bytes of its file."""
    crc: int
    """CRC-32 of its file."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What `stream.json` says."""

    corpus: dict[str, Any]
    """The record of the corpus as it was where it was made."""
    tokenizer: str
    """Fingerprint of what made its ids."""
    shard_tokens: int
    """Tokens of each shard but the last of a side."""
    shards: dict[str, tuple[ShardFacts, ...]]
    """Those of each side, in order."""

    @property
    def digest(self) -> str:
        """The corpus's own."""
        return str(self.corpus["digest"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the ids."""
        name: str = self.corpus["dtype"]
        return np.dtype(name)

    def tokens(self, side: str) -> int:
        """Length of a side."""
        return int(self.corpus[side]["tokens"])

    def facts(self, name: str) -> ShardFacts:
        """Return the shard of a name, as `name_of` makes it."""
        side, number = side_and_number(name)
        return self.shards[side][number]

    def size(self, *sides: str) -> int:
        """Return bytes of all shards of some sides."""
        return sum(facts.size for side in sides for facts in self.shards[side])

    def as_json(self) -> bytes:
        """Return the file's content."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> StreamRecord:
        """Read it.

        Raises:
            TrainctlError: It is no such record, or of a later version.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError(f"format is not {FORMAT}")
            sides = {
                side: tuple(ShardFacts(**facts) for facts in data["shards"][side]) for side in SIDES
            }
            record = cls(**{**data, "shards": sides})
            if not re.fullmatch("[0-9A-Za-z]+", record.digest):
                raise ValueError("its digest, which folders are named after, is none")
            for side in SIDES:
                if len(sides[side]) != len(list(spans(record.tokens(side), record.shard_tokens))):
                    raise ValueError(f"the shards of {side} do not have its tokens")
            return record
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TrainctlError(
                f"{where} is no record of a prepared corpus: {type(error).__name__}: {error}",
                hint="trainctl data prepare ... --to URL writes one",
                exit_code=ExitCode.environment,
            ) from None


def name_of(side: str, number: int) -> str:
    """File name of a shard."""
    return f"{side}-{number:05d}.shard"


def side_and_number(name: str) -> tuple[str, int]:
    """Return the inverse of `name_of`."""
    side, _, number = name.removesuffix(".shard").rpartition("-")
    return side, int(number)


def folder_of(digest: str) -> str:
    """Where the shards of a corpus lie under its URL: an unfinished other one is not mixed in."""
    return digest[:16]


def spans(tokens: int, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """First token of each shard of a side and the first behind it."""
    for start in range(0, tokens, shard_tokens):
        yield start, min(start + shard_tokens, tokens)


def shards_of(start: int, stop: int, shard_tokens: int) -> range:
    """Return the shards that tokens from `start` up to `stop` are read from: the fewest.

    The first token behind a shard is in it too.
    """
    if stop <= start:
        return range(0)
    first = start // shard_tokens
    return range(first, max(first + 1, -(-(stop - 1) // shard_tokens)))


def packed(
    ids: Tokens, ends: npt.NDArray[Any], start: int, stop: int, dtype: np.dtype[Any]
) -> bytes:
    """Return the file of a shard.

    Args:
        ids: Those of the whole side.
        ends: Tokens of the side up to the end of each document, ascending, shape (documents,).
        start: First token of the shard.
        stop: The first behind it.
        dtype: Of the ids in the file.
    """
    bounds = np.array([start, stop], dtype=ends.dtype)
    # A first document without a token ends at 0, which is behind no other shard.
    first, last = np.searchsorted(ends, bounds, side="right")
    relative = (ends[0 if start == 0 else first : last].astype(np.int64) - start).astype(END)
    return relative.tobytes() + ids[start : stop + 1].astype(dtype).tobytes()


def unpacked(
    raw: memoryview, facts: ShardFacts, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the ids of a shard's file and its ends, counted from its first token: views of it."""
    ends = np.frombuffer(raw, END, count=facts.documents)
    return np.frombuffer(raw, dtype, offset=ends.nbytes), ends
