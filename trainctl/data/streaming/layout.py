"""Layout of a remote corpus: shards of equally many tokens, and a record that is written last.

| under the corpus's URL | |
|---|---|
| `stream.json` | the record of the corpus, the tokenizer, and each shard's size and CRC-32 |
| `DIGEST/SIDE-NUMBER.shard` | ends of documents, u32 each, then the ids, little endian |

Shard k of S tokens has the S ids from position k S on, and the next id, which is the label of the
last one. It also has the document ends behind k S and up to (k + 1) S, counted from k S.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.token_arrays import Tokens
from trainctl.errors import ExitCode, TrainctlError

RECORD = "stream.json"
FORMAT = 1
END = np.dtype("<u4")
SPLITS = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """Record of one shard."""

    documents: int
    """Number of documents that end in the shard."""
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """Record of a remote corpus, as stored in `stream.json`."""

    corpus: dict[str, Any]
    """Record of the corpus (`corpus.json`) on the machine that prepared it."""
    tokenizer: str
    shard_tokens: int
    """Tokens of each shard except the last of a split."""
    shards: dict[str, tuple[ShardFacts, ...]]
    """Shards of each split, in order."""

    @property
    def digest(self) -> str:
        """Digest of the corpus."""
        return str(self.corpus["digest"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the ids."""
        name: str = self.corpus["dtype"]
        return np.dtype(name)

    def tokens(self, split: str) -> int:
        """Return the number of tokens of a split."""
        return int(self.corpus[split]["tokens"])

    def facts(self, name: str) -> ShardFacts:
        """Return the record of the shard with this file name."""
        split, number = split_and_number(name)
        return self.shards[split][number]

    def size(self, *splits: str) -> int:
        """Return the bytes of all shards of the splits."""
        return sum(facts.size for split in splits for facts in self.shards[split])

    def as_json(self) -> bytes:
        """Return the content of `stream.json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> StreamRecord:
        """Parse the content of `stream.json`; `where` is its location, for errors.

        Raises:
            TrainctlError: The record is invalid, or of a later version (exit code 4).
        """
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError(f"format is not {FORMAT}")
            splits = {
                split: tuple(ShardFacts(**facts) for facts in data["shards"][split])
                for split in SPLITS
            }
            record = cls(**{**data, "shards": splits})
            if not re.fullmatch("[0-9A-Za-z]+", record.digest):
                raise ValueError("its digest, which folders are named after, is none")
            for split in SPLITS:
                if len(splits[split]) != len(
                    list(spans(record.tokens(split), record.shard_tokens))
                ):
                    raise ValueError(f"the shards of {split} do not have its tokens")
            return record
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TrainctlError(
                f"{where} is no record of a prepared corpus: {type(error).__name__}: {error}",
                hint="trainctl data prepare ... --to URL writes one",
                exit_code=ExitCode.environment,
            ) from None


def name_of(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:05d}.shard"


def split_and_number(name: str) -> tuple[str, int]:
    """Return the split and number in a shard's file name: the inverse of `name_of`."""
    split, _, number = name.removesuffix(".shard").rpartition("-")
    return split, int(number)


def folder_of(digest: str) -> str:
    """Return the folder of a corpus's shards under its URL.

    It is named by digest, so that the shards of another, unfinished corpus are not mixed in.
    """
    return digest[:16]


def spans(tokens: int, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the range of tokens of each shard of a split."""
    for start in range(0, tokens, shard_tokens):
        yield start, min(start + shard_tokens, tokens)


def shards_of(start: int, stop: int, shard_tokens: int) -> range:
    """Return the fewest shards from which tokens `start` up to `stop` can be read.

    Each shard also has the first token behind it.
    """
    if stop <= start:
        return range(0)
    first = start // shard_tokens
    return range(first, max(first + 1, -(-(stop - 1) // shard_tokens)))


def packed(
    ids: Tokens, ends: npt.NDArray[Any], start: int, stop: int, dtype: np.dtype[Any]
) -> bytes:
    """Return the file content of the shard with tokens `start` up to `stop` of a split.

    Args:
        ends: Document ends of the split in tokens, ascending, shape (documents,).
    """
    bounds = np.array([start, stop], dtype=ends.dtype)
    # An empty first document ends at 0, which only the first shard can contain.
    first, last = np.searchsorted(ends, bounds, side="right")
    relative = (ends[0 if start == 0 else first : last].astype(np.int64) - start).astype(END)
    return relative.tobytes() + ids[start : stop + 1].astype(dtype).tobytes()


def unpacked(
    raw: memoryview, facts: ShardFacts, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ids and document ends (from its first token) of a shard's file, as views."""
    ends = np.frombuffer(raw, END, count=facts.documents)
    return np.frombuffer(raw, dtype, offset=ends.nbytes), ends
