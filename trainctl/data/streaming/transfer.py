"""Remote corpora: their layout, and their transfer to and from any URL that fsspec supports.

A corpus is shards of equally many tokens, and a record that is written last.

| under the corpus's URL | |
|---|---|
| `stream.json` | the record of the corpus, the tokenizer, and each shard's size and CRC-32 |
| `DIGEST/SIDE-NUMBER.shard` | ends of documents, u32 each, then the ids, little endian |

Shard k of S tokens has the S ids from position k S on, and the next id, which is the label of the
last one. It also has the document ends behind k S and up to (k + 1) S, counted from k S.

Failures are handled as in all reading of URLs (`readers.remote`): retries with waits that are
reported, then an error.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.token_arrays import Tokens
from trainctl.errors import MachineError, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.readers.remote import (
    Notify,
    call_with_retries,
    file_system_of,
    is_url,
    list_url,
    print_notice,
)
from trainctl.runs.files import write_bytes

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
                    list(shard_spans(record.tokens(split), record.shard_tokens))
                ):
                    raise ValueError(f"the shards of {split} do not have its tokens")
            return record
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MachineError(
                f"{where} is no record of a prepared corpus: {type(error).__name__}: {error}",
                hint="trainctl data prepare ... --to URL writes one",
            ) from None


def shard_file_name(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:05d}.shard"


def split_and_number(name: str) -> tuple[str, int]:
    """Return the split and number in a shard's file name: the inverse of `shard_file_name`."""
    split, _, number = name.removesuffix(".shard").rpartition("-")
    return split, int(number)


def corpus_folder_name(digest: str) -> str:
    """Return the folder of a corpus's shards under its URL.

    It is named by digest, so that the shards of another, unfinished corpus are not mixed in.
    """
    return digest[:16]


def shard_spans(tokens: int, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the range of tokens of each shard of a split."""
    for start in range(0, tokens, shard_tokens):
        yield start, min(start + shard_tokens, tokens)


def shards_covering(start: int, stop: int, shard_tokens: int) -> range:
    """Return the fewest shards from which tokens `start` up to `stop` can be read.

    Each shard also has the first token behind it.
    """
    if stop <= start:
        return range(0)
    first = start // shard_tokens
    return range(first, max(first + 1, -(-(stop - 1) // shard_tokens)))


def pack_shard(
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


def unpack_shard(
    raw: memoryview, facts: ShardFacts, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ids and document ends (from its first token) of a shard's file, as views."""
    ends = np.frombuffer(raw, END, count=facts.documents)
    return np.frombuffer(raw, dtype, offset=ends.nbytes), ends


_BLOCK_BYTES = 1 << 24
"""Bytes per read."""
_AT_ONCE = 4
"""Number of shards written at once. Each of them is in memory as a whole."""

SplitArrays = tuple[Tokens, npt.NDArray[Any]]
"""Ids and document ends of a split."""


def as_url(place: str) -> str:
    """Return a URL without a final slash, and a folder as a file URL."""
    if is_url(place):
        return place.rstrip("/")
    return f"file://{local_path(place).resolve()}"  # not quoted: fsspec decodes no %20


def read_record(place: str, notify: Notify = print_notice) -> StreamRecord:
    """Read the record of the corpus at a URL or in a folder.

    Raises:
        TrainctlError: There is no prepared corpus, or the server does not respond (exit code 4).
    """
    url = f"{as_url(place)}/{RECORD}"
    text = _read_text(url, notify)
    if text is None:
        raise MachineError(
            f"there is no prepared corpus at {place}: it has no {RECORD}",
            hint=f"trainctl data prepare ... --to {place}, again if it was cut off",
        )
    return StreamRecord.from_json(text, url)


def blocks_of_shard(place: str, digest: str, notify: Notify, name: str) -> Iterator[bytes]:
    """Yield the bytes of a shard of the corpus at `place`. `notify` is called before each wait.

    Raises:
        TrainctlError: The shard is missing, or the server does not respond (exit code 4).
    """
    url = f"{as_url(place)}/{corpus_folder_name(digest)}/{name}"
    files, _ = list_url(url, notify)
    if not files:
        raise MachineError(
            f"{url} is not there",
            hint="write the corpus again: trainctl data prepare ... --to URL",
        )
    with files[0].open(notify=notify) as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def upload_shards(
    place: str,
    record: StreamRecord,
    splits: dict[str, SplitArrays],
    show: Callable[[str], None],
    notify: Notify = print_notice,
) -> StreamRecord:
    """Write a corpus to a URL or into a folder, and return the record with its shards.

    Shards that exist are not written again. `show` is called with the progress, `notify` before
    each wait.

    Raises:
        TrainctlError: Another corpus is there, or it cannot be written (exit code 4).
    """
    url = as_url(place)
    _require_same(url, record, notify)
    folder = f"{url}/{corpus_folder_name(record.digest)}"
    there = {file.name: file.size for file in list_url(f"{folder}/", notify)[0]}
    work = [
        (split, number, span)
        for split in SPLITS
        for number, span in enumerate(shard_spans(len(splits[split][0]), record.shard_tokens))
    ]

    def write(job: tuple[str, int, tuple[int, int]]) -> ShardFacts:
        split, number, (start, stop) = job
        ids, ends = splits[split]
        raw = pack_shard(ids, ends, start, stop, record.dtype)
        tokens = min(stop + 1, len(ids)) - start
        documents = (len(raw) - tokens * record.dtype.itemsize) // END.itemsize
        name = shard_file_name(split, number)
        if there.get(name) != len(raw):
            _write_atomically(f"{folder}/{name}", raw, notify)
        return ShardFacts(documents, len(raw), zlib.crc32(raw))

    facts: dict[str, list[ShardFacts]] = {split: [] for split in SPLITS}
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        # A few at a time: `map` over all jobs would queue the results of all shards.
        for first in range(0, len(work), _AT_ONCE):
            jobs = work[first : first + _AT_ONCE]
            for job, made in zip(jobs, threads.map(write, jobs), strict=True):
                facts[job[0]].append(made)
            show(f"writing to {place}: {first + len(jobs):,} of {len(work):,} shards")
    whole = replace(record, shards={split: tuple(facts[split]) for split in SPLITS})
    _write_atomically(f"{url}/{RECORD}", whole.as_json(), notify)
    return whole


def _require_same(url: str, record: StreamRecord, notify: Notify) -> None:
    text = _read_text(f"{url}/{RECORD}", notify)
    if text is None:
        return
    other = StreamRecord.from_json(text, f"{url}/{RECORD}")
    was, now = ((each.digest, each.tokenizer, each.shard_tokens) for each in (other, record))
    if was != now:
        raise TrainctlError(
            f"another corpus lies at {url}: runs that read it would find this one",
            hint="another place, or remove what is there",
        )


def _read_text(url: str, notify: Notify) -> bytes | None:
    """Return the content of a small file, or None if there is none."""
    file_system, path = file_system_of(url)

    def look() -> Any:
        try:
            file_system.invalidate_cache()
            return file_system.cat_file(path)
        except FileNotFoundError:
            return None

    found: bytes | None = call_with_retries(look, url, notify=notify)
    return found


def _write_atomically(url: str, raw: bytes, notify: Notify) -> None:
    """Write a file atomically: object stores do so themselves, a local file is renamed."""
    file_system, path = file_system_of(url)
    if url.startswith("file://"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        call_with_retries(partial(write_bytes, Path(path), raw), url, notify=notify)
    else:
        call_with_retries(partial(file_system.pipe_file, path, raw), url, notify=notify)
