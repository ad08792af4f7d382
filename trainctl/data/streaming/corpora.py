"""Streamed corpora of a run: located before its ranks start, and read by the ranks. No torch."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import DataConfig, RunConfig
from trainctl.data.cache_files import cache_folder, convert_write_errors
from trainctl.data.corpus_record import Corpus, Split
from trainctl.data.order import SampleOrder
from trainctl.data.streaming.cache import Lookahead, ShardCache
from trainctl.data.streaming.transfer import (
    RECORD,
    StreamRecord,
    as_url,
    blocks_of_shard,
    read_record,
    shard_file_name,
    shards_covering,
    split_and_number,
    unpack_shard,
    upload_shards,
)
from trainctl.data.tokenizer import Tokenizer
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.options.data.stream import StreamConfig, shards_needed
from trainctl.plans.mixture import sources_of
from trainctl.readers.remote import Notify, print_notice
from trainctl.runs.files import write_bytes

_KEPT = 1e18
"""Next use of held-out shards: after all training shards in sight, since each evaluation needs
them.
"""
_LOOK_SECONDS = 1.0
"""Interval of retries to fetch ahead, as another rank may have made room."""
_STEPS_APART = 4
"""Steps that ranks of a node may be apart: the batches they prefetch, and a few more."""


class Stream:
    """A remote corpus as one process of this node reads it.

    `record` is the content of the corpus's `stream.json`. `notify` is called with a sentence before
    waiting, and may be replaced.
    """

    def __init__(self, section: StreamConfig, record: StreamRecord) -> None:
        assert section.url is not None
        self.notify: Notify = print_notice
        self.record = record
        self.limit = section.cache_bytes
        self._ahead: Lookahead | None = None
        self._moved = threading.Event()
        self.cache = ShardCache(
            shard_cache_folder(section, record.digest),
            self.limit,
            record.facts,
            partial(blocks_of_shard, section.url, record.digest, self._tell),
            self._next_use,
            self._tell,
        )

    def tokens(self, split: Split) -> StreamedTokens:
        """Return the ids and document ends of a split."""
        return StreamedTokens(self.record, split.file.removesuffix(".bin"), self.cache)

    def follow(self, order: SampleOrder, source: str, *, end: int, batch: int) -> None:
        """Start a thread that fetches shards ahead of the samples, from the first `move` on.

        Args:
            end: Counter behind the last sample of the run.
        """
        size = max((facts.size for facts in self.record.shards["train"]), default=1)
        kept = max((facts.size for facts in self.record.shards["held_out"]), default=0)
        self._ahead = Lookahead(
            partial(_shards_needed, order, source, self.record.shard_tokens),
            end=end,
            room=max(1, (self.limit - kept) // size),
            shards=len(self.record.shards["train"]),
            lag=_STEPS_APART * batch,
        )
        threading.Thread(target=self._fetch, name=f"shards of {source}", daemon=True).start()

    def move(self, counter: int) -> None:
        """Set the counter of the sample that is read now."""
        if self._ahead is not None:
            self._ahead.move(counter)
            self._moved.set()

    def _fetch(self) -> None:
        ahead = self._ahead
        assert ahead is not None
        self._moved.wait()
        while True:
            self._moved.clear()
            while ahead.look():
                pass
            names = [f"train-{number:05d}.shard" for number in ahead.wanted()]
            fetched = False
            # Errors are ignored here: a rank that needs the shard fetches it again and raises.
            with suppress(TrainctlError):
                fetched = self.cache.fetch_ahead(names)
            if not fetched:
                self._moved.wait(_LOOK_SECONDS)

    def _next_use(self, name: str) -> float:
        split, number = split_and_number(name)
        if split != "train":
            return _KEPT
        use = self._ahead.next_use(number) if self._ahead is not None else None
        return inf if use is None else use

    def _tell(self, message: str) -> None:
        self.notify(message)


@dataclass(frozen=True, slots=True)
class StreamedCorpus(Corpus):
    """A remote corpus that is read through a local cache."""

    stream: Stream | None = None

    def tokens(self, split: Split, *, in_order: bool = True) -> StreamedTokens:
        """Return the split's ids, which are fetched when they are read."""
        assert self.stream is not None
        return self.stream.tokens(split)

    def ends(self, split: Split) -> Any:
        """Return the document ends in tokens, which are fetched when they are read."""
        assert self.stream is not None
        return self.stream.tokens(split).ends

    def origin(self, split: Split) -> None:
        """Return None: shards have no origins."""

    def problem(self, *splits: Split) -> str:
        """Return an empty text: each shard is verified when it is fetched."""
        return ""


def shard_cache_folder(section: StreamConfig, digest: str) -> Path:
    """Return this node's cache folder of a corpus. Each node has its own, even on a shared disk."""
    base = local_path(section.cache_folder) if section.cache_folder else cache_folder()
    return base / f"stream-{digest[:24]}-{socket.gethostname()}"


def open_streamed_corpus(section: StreamConfig, tokenizer: Tokenizer, notify: Notify) -> Corpus:
    """Return the remote corpus that a section names, and keep its record locally.

    Raises:
        TrainctlError: There is no corpus, it has another tokenizer, or the server does not respond.
    """
    assert section.url is not None
    record = read_record(section.url, notify)
    if record.tokenizer != tokenizer.fingerprint:
        raise TrainctlError(
            f"data.url={section.url} was made with another tokenizer than this one",
            hint="the tokenizer that it was prepared with, in tokenizer",
        )
    try:
        corpus = Corpus.of(record.corpus)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MachineError(
            f"the record of the corpus at data.url={section.url} is not understood: "
            f"{type(error).__name__}: {error}",
            hint="the version of trainctl that wrote it, or a later one",
        ) from None
    folder = shard_cache_folder(section, record.digest)
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / RECORD, record.as_json())
    return replace(corpus, folder=as_url(section.url))


def check_shard_caches(config: RunConfig, corpora: Mapping[str, Corpus]) -> None:
    """Check that the cache has room for a run, and verify its shards, before ranks start.

    Raises:
        TrainctlError: `cache_bytes` is too small for the order of the run, or the disk is too full.
    """
    for name, section in sources_of(config.data).items():
        if not isinstance(section, StreamConfig):
            continue
        stream = _open_stream(section, corpora[name])
        record = stream.record
        sizes = [facts.size for facts in record.shards["train"]]
        needed = shards_needed(section.shuffle_shards, shuffle=config.data.shuffle)
        bytes_needed = sum(sorted(sizes)[-(needed or len(sizes)) :])
        bytes_needed += max((facts.size for facts in record.shards["held_out"]), default=0)
        key = f"data.sources.{name}." if config.data.sources else "data."
        if section.cache_bytes < bytes_needed:
            raise TrainctlError(
                f"{key}cache_bytes={section.cache_bytes} holds less than has to be here at a "
                f"time: {bytes_needed:,} bytes",
                hint=f"{key}cache_bytes={bytes_needed}, or a smaller {key}shuffle_shards",
            )
        stream.cache.clean()
        folder = shard_cache_folder(section, record.digest)
        free = shutil.disk_usage(folder).free + stream.cache.size()
        if free < min(section.cache_bytes, record.size("train", "held_out")):
            raise MachineError(
                f"{folder} has {free / 1e9:,.2f} GB free, and {key}cache_bytes is "
                f"{section.cache_bytes / 1e9:,.2f} GB",
                hint=f"free space there, or name another folder in {key}cache_folder",
            )


def open_remote_corpora(data: DataConfig, corpora: Mapping[str, Corpus]) -> dict[str, Corpus]:
    """Return the same corpora, with remote ones replaced by readable `StreamedCorpus` objects."""
    sections = sources_of(data)
    found = dict(corpora)
    for name, corpus in corpora.items():
        section = sections.get(name)
        if isinstance(section, StreamConfig):
            stream = _open_stream(section, corpus)
            plain = {**asdict(corpus), "train": corpus.train, "held_out": corpus.held_out}
            found[name] = StreamedCorpus(**plain, stream=stream)
    return found


def upload_corpus(
    corpus: Corpus, tokenizer: Tokenizer, place: str, shard_tokens: int, show: Notify
) -> StreamRecord:
    """Write a corpus to remote storage, in the layout that `data=stream` reads.

    Raises:
        TrainctlError: As `upload_shards`; or the corpus is of conversations.
    """
    if corpus.is_marked:
        raise TrainctlError(
            "conversations cannot be read from elsewhere: their bins have documents of all shards",
            hint="trainctl data prepare without --to, on a disk that all nodes have",
        )
    splits = {
        name: (corpus.tokens(split), corpus.ends(split))
        for name, split in (("train", corpus.train), ("held_out", corpus.held_out))
    }
    plain = replace(
        corpus,
        folder="",
        train=replace(corpus.train, file="train.bin", in_place=()),
        held_out=replace(corpus.held_out, file="held_out.bin", in_place=()),
    )
    record = StreamRecord(plain.to_plain(), tokenizer.fingerprint, shard_tokens, {})
    return upload_shards(place, record, splits, show)


def _open_stream(section: StreamConfig, corpus: Corpus) -> Stream:
    """Open a remote corpus by the locally kept record, or read the record again if it is gone."""
    assert section.url is not None
    kept = shard_cache_folder(section, corpus.digest) / RECORD
    with suppress(OSError, TrainctlError):
        return Stream(section, StreamRecord.from_json(kept.read_bytes(), str(kept)))
    record = read_record(section.url)
    if record.digest != corpus.digest:
        raise RunStateError(
            f"{section.url} has another corpus than this run has begun with",
            hint="restore it",
        )
    return Stream(section, record)


def _shards_needed(
    order: SampleOrder, source: str, shard_tokens: int, first: int, count: int
) -> list[int]:
    samples = order.at(np.arange(first, first + count))
    mine = samples.source == order.names.index(source)
    lengths = np.array([stage.length for stage in order.stages])[samples.stage[mine]]
    starts = samples.index[mine] * lengths
    firsts = starts // shard_tokens
    lasts = np.maximum(firsts, -(-(starts + lengths) // shard_tokens) - 1)
    if (firsts == lasts).all():
        return list(dict.fromkeys(firsts.tolist()))
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return list(dict.fromkeys(shard for a, b in pairs for shard in range(a, b + 1)))


class StreamedTokens:
    """Ids and document ends of one split of a remote corpus. Reading waits for shards."""

    def __init__(self, record: StreamRecord, split: str, cache: ShardCache) -> None:
        self._record, self._split, self._cache = record, split, cache
        self._length = record.tokens(split)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        """Return a copy of a slice of ids; steps are not supported."""
        start, stop, step = span.indices(self._length)
        assert step == 1
        parts, size = [], self._record.shard_tokens
        for number in shards_covering(start, stop, size):
            with self._shard(number) as (ids, _):
                last = min(stop, number * size + len(ids))
                parts.append(ids[start - number * size : last - number * size].copy())
            start = last
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty(0, self._record.dtype), *parts])

    def ends_of(self, number: int) -> npt.NDArray[np.int64]:
        """Return the document ends in a shard, in tokens of the split, ascending."""
        with self._shard(number) as (_, ends):
            return ends.astype(np.int64) + number * self._record.shard_tokens

    @property
    def documents(self) -> tuple[int, ...]:
        """Number of documents that end in each shard."""
        return tuple(facts.documents for facts in self._record.shards[self._split])

    @property
    def shard_tokens(self) -> int:
        """Tokens of each shard except the last."""
        return self._record.shard_tokens

    @property
    def ends(self) -> StreamedEnds:
        """Document ends of the split, read by shards."""
        return StreamedEnds(self)

    @contextmanager
    def _shard(self, number: int) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Map a shard and provide its ids and document ends."""
        name = shard_file_name(self._split, number)
        descriptor = self._cache.opened(name)
        try:
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        # The views keep the map open until they are deleted; callers copy what they need.
        yield unpack_shard(memoryview(mapped), self._record.facts(name), self._record.dtype)


class StreamedEnds:
    """Document ends of a split, with the part of numpy's array interface that readers use."""

    dtype = np.dtype("<u8")

    def __init__(self, tokens: StreamedTokens) -> None:
        self._tokens = tokens
        self._firsts = np.concatenate([[0], np.cumsum(tokens.documents, dtype=np.int64)])
        self._last: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def searchsorted(
        self, values: npt.ArrayLike, side: Literal["left", "right"] = "left", sorter: None = None
    ) -> npt.NDArray[np.int64]:
        """Return insertion points, as `numpy.searchsorted` does by calling this method."""
        array = np.asarray(values).astype(np.int64)
        flat = [self._place(value, side) for value in array.reshape(-1).tolist()]
        return np.array(flat, dtype=np.int64).reshape(array.shape)

    def __getitem__(self, place: Any) -> Any:
        """Return the end of a document, or the ends of consecutive documents."""
        if not isinstance(place, slice):
            return self[int(place) : int(place) + 1][0]
        start, stop, step = place.indices(len(self))
        assert step == 1
        found = [np.empty(0, self.dtype)]
        while start < stop:
            number = int(np.searchsorted(self._firsts, start, "right")) - 1
            first, last = self._firsts[number], min(stop, int(self._firsts[number + 1]))
            found.append(
                self._ends_of_part(number)[start - first : last - first].astype(self.dtype)
            )
            start = last
        return np.concatenate(found)

    def _place(self, value: int, side: Literal["left", "right"]) -> int:
        # Shard k has the ends in (k S, (k + 1) S]: find the shard that has `value`.
        number = max(0, -(-value // self._tokens.shard_tokens) - 1)
        if number >= len(self._firsts) - 1:
            return len(self)
        return int(self._firsts[number] + np.searchsorted(self._ends_of_part(number), value, side))

    def _ends_of_part(self, number: int) -> npt.NDArray[np.int64]:
        if self._last[0] != number:
            self._last = number, self._tokens.ends_of(number)
        return self._last[1]
