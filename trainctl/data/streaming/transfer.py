"""Transfer of corpora to and from storage: any URL that fsspec supports, or a folder.

Failures are handled as in all reading of URLs (`readers.remote`): retries with waits that are
reported, then an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trainctl.data.streaming.layout import (
    END,
    RECORD,
    SPLITS,
    ShardFacts,
    StreamRecord,
    folder_of,
    name_of,
    packed,
    spans,
)
from trainctl.data.token_arrays import Tokens
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers.remote import (
    Notify,
    call_with_retries,
    file_system_of,
    is_url,
    list_url,
    print_notice,
)
from trainctl.runs.files import write_bytes

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
    return f"file://{Path(place).expanduser().resolve()}"  # not quoted: fsspec decodes no %20


def read_record(place: str, notify: Notify = print_notice) -> StreamRecord:
    """Read the record of the corpus at a URL or in a folder.

    Raises:
        TrainctlError: There is no prepared corpus, or the server does not respond (exit code 4).
    """
    url = f"{as_url(place)}/{RECORD}"
    text = _text_of(url, notify)
    if text is None:
        raise TrainctlError(
            f"there is no prepared corpus at {place}: it has no {RECORD}",
            hint=f"trainctl data prepare ... --to {place}, again if it was cut off",
            exit_code=ExitCode.environment,
        )
    return StreamRecord.from_json(text, url)


def blocks_of_shard(place: str, digest: str, notify: Notify, name: str) -> Iterator[bytes]:
    """Yield the bytes of a shard of the corpus at `place`. `notify` is called before each wait.

    Raises:
        TrainctlError: The shard is missing, or the server does not respond (exit code 4).
    """
    url = f"{as_url(place)}/{folder_of(digest)}/{name}"
    files, _ = list_url(url, notify)
    if not files:
        raise TrainctlError(
            f"{url} is not there",
            hint="write the corpus again: trainctl data prepare ... --to URL",
            exit_code=ExitCode.environment,
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
    folder = f"{url}/{folder_of(record.digest)}"
    there = {file.name: file.size for file in list_url(f"{folder}/", notify)[0]}
    work = [
        (split, number, span)
        for split in SPLITS
        for number, span in enumerate(spans(len(splits[split][0]), record.shard_tokens))
    ]

    def write(job: tuple[str, int, tuple[int, int]]) -> ShardFacts:
        split, number, (start, stop) = job
        ids, ends = splits[split]
        raw = packed(ids, ends, start, stop, record.dtype)
        tokens = min(stop + 1, len(ids)) - start
        documents = (len(raw) - tokens * record.dtype.itemsize) // END.itemsize
        name = name_of(split, number)
        if there.get(name) != len(raw):
            _put(f"{folder}/{name}", raw, notify)
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
    _put(f"{url}/{RECORD}", whole.as_json(), notify)
    return whole


def _require_same(url: str, record: StreamRecord, notify: Notify) -> None:
    text = _text_of(f"{url}/{RECORD}", notify)
    if text is None:
        return
    other = StreamRecord.from_json(text, f"{url}/{RECORD}")
    was, now = ((each.digest, each.tokenizer, each.shard_tokens) for each in (other, record))
    if was != now:
        raise TrainctlError(
            f"another corpus lies at {url}: runs that read it would find this one",
            hint="another place, or remove what is there",
        )


def _text_of(url: str, notify: Notify) -> bytes | None:
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


def _put(url: str, raw: bytes, notify: Notify) -> None:
    """Write a file atomically: object stores do so themselves, a local file is renamed."""
    file_system, path = file_system_of(url)
    if url.startswith("file://"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        call_with_retries(partial(write_bytes, Path(path), raw), url, notify=notify)
    else:
        call_with_retries(partial(file_system.pipe_file, path, raw), url, notify=notify)
