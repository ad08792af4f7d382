"""`corpus.json`: the record of a tokenized corpus, with the checksums of its files. No torch."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.cache_files import map_array
from trainctl.data.targets import TARGET
from trainctl.data.token_arrays import JoinedSpans, LossMask, Span, Tokens, UnmarkedTokens
from trainctl.errors import RunStateError, TrainctlError

FORMAT = 2
_BLOCKS = ("blocks", "ends_blocks", "origin_blocks", "targets_blocks", "records_blocks")
_OPTIONAL = (
    *("targets", "targets_blocks", "target_width", "classes"),
    *("records", "records_blocks", "records_bytes"),
    "has_messages",
)
"""Fields that `corpus.json` does not have where they are empty."""
ENDS = "<u8"
"""numpy dtype of document ends."""
ORIGIN = np.dtype([("file", "<u4"), ("line", "<u8")])
"""Origin of a document: index into the corpus's `files.json`, and line from 1 (0: the whole
file).
"""
FILES = "files.json"
"""Name of the JSON list of source paths that `ORIGIN` indexes."""
BLOCK_BYTES = 1 << 24
"""Bytes covered by one checksum (CRC-32, which zlib computes at several gigabytes a second)."""


@dataclass(frozen=True, slots=True)
class Split:
    """One split of the corpus."""

    file: str
    """Name of the token file in the corpus folder."""
    tokens: int
    documents: int
    """Number of documents, each followed by the end-of-document id if there is one."""
    sha256: str = ""
    blocks: tuple[int, ...] = ()
    """CRC-32 of each `BLOCK_BYTES` of the token file, in order."""
    ends: str = ""
    """Name of the file of document ends: u64, little endian, tokens of the split up to each end."""
    ends_blocks: tuple[int, ...] = ()
    origin: str = ""
    """Name of the file with the `ORIGIN` of each document; empty if origins are unknown."""
    origin_blocks: tuple[int, ...] = ()
    in_place: tuple[Span, ...] = ()
    """Spans of existing token files that hold the ids; `file` is then empty."""
    targets: str = ""
    """Name of the file with the targets of each document: f32, little endian, `target_width` a
    document, NaN where there is none. Empty if no document of the corpus has any.
    """
    targets_blocks: tuple[int, ...] = ()
    target_width: int = 0
    records: str = ""
    """Name of the file with a line of JSON for each document (`data.targets`); empty without."""
    records_blocks: tuple[int, ...] = ()
    records_bytes: int = 0

    def files(self, dtype: str) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yield each file of the split with its size in bytes and its block checksums."""
        if not self.in_place:
            yield self.file, self.tokens * np.dtype(dtype).itemsize, self.blocks
        yield self.ends, self.documents * np.dtype(ENDS).itemsize, self.ends_blocks
        if self.origin:
            yield self.origin, self.documents * ORIGIN.itemsize, self.origin_blocks
        if self.targets:
            size = self.documents * self.target_width * np.dtype(TARGET).itemsize
            yield self.targets, size, self.targets_blocks
        if self.records:
            yield self.records, self.records_bytes, self.records_blocks


@dataclass(frozen=True, slots=True)
class Corpus:
    """Record of a tokenized corpus, as stored in `corpus.json`."""

    folder: str
    dtype: str
    end_of_document: int | None
    train: Split
    held_out: Split
    """Held-out text; 0 tokens if nothing is held out."""
    unigram_entropy: float
    """Unigram entropy of the train split, in nats: the loss of a model that knows only token
    frequencies.
    """
    digest: str
    """Hash of both splits and their roles. A resume requires the same digest."""
    bad_text: dict[str, Any] = field(default_factory=dict)
    """Numbers of repaired and of skipped documents, with examples; empty if there are none."""
    former_digest: str = ""
    """Empty; records have the key."""
    format: int = FORMAT
    is_marked: bool = False
    """Whether ids carry loss marks (`data.token_arrays`)."""
    classes: tuple[str, ...] = ()
    """Names of the classes that targets number; empty if targets are numbers of another kind."""
    has_messages: bool = False
    """Whether its prompts are lists of messages, which a chat template rendered; known of corpora
    in a run's record.
    """

    def to_plain(self) -> dict[str, Any]:
        """Return the record as plain data, without `_OPTIONAL` fields that are empty."""
        plain = asdict(self)
        for fields in (plain, plain["train"], plain["held_out"]):
            for name in _OPTIONAL:
                if name in fields and not fields[name]:
                    del fields[name]
        return plain

    def tokens(self, split: Split, *, in_order: bool = True) -> Tokens:
        """Return the split's ids without loss marks, shape (tokens,), read by slices.

        `in_order` is passed to `stored`, whose errors this raises.
        """
        found = self.stored(split, in_order=in_order)
        return UnmarkedTokens(found) if self.is_marked else found

    def loss_mask(self, split: Split) -> LossMask | None:
        """Return the split's loss mask, read by slices; None if every token has a loss."""
        return LossMask(self.stored(split, in_order=False)) if self.is_marked else None

    def stored(self, split: Split, *, in_order: bool = True) -> Tokens:
        """Return the split's ids as stored, loss marks included, shape (tokens,), memory-mapped.

        `in_order=False` is for reading scattered samples: otherwise the kernel reads 128 KiB around
        each page fault.
        """
        if split.in_place:
            return JoinedSpans(split.in_place)
        return self._mapped(split, split.file, self.dtype, split.tokens, in_order=in_order)

    def ends(self, split: Split) -> npt.NDArray[np.uint64]:
        """Return the end of each document in tokens, shape (documents,), memory-mapped."""
        return self._mapped(split, split.ends, ENDS, split.documents)

    def origin(self, split: Split) -> npt.NDArray[Any] | None:
        """Return the `ORIGIN` of each document, (documents,), memory-mapped; None if unknown."""
        return self._mapped(split, split.origin, ORIGIN, split.documents) if split.origin else None

    def targets(self, split: Split) -> npt.NDArray[np.float32] | None:
        """Return the targets of each document, (documents, width), memory-mapped; None without."""
        if not split.targets:
            return None
        size = split.documents * split.target_width
        return self._mapped(split, split.targets, TARGET, size).reshape(-1, split.target_width)

    def records(self, split: Split) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of the file with a line for each document; None if there is none."""
        return (
            self._mapped(split, split.records, "u1", split.records_bytes) if split.records else None
        )

    def _mapped(
        self, split: Split, file: str, dtype: Any, length: int, *, in_order: bool = False
    ) -> npt.NDArray[Any]:
        if length == 0:
            return np.empty(0, dtype=dtype)
        problem = self._size_problem(split)
        if problem:
            raise RunStateError(
                f"the tokenized corpus in {self.folder} is damaged: {problem}",
                hint="start again: a launch or resume looks it through and tokenizes it anew",
            )
        return map_array(Path(self.folder) / file, dtype, in_order=in_order)

    def problem(self, *splits: Split) -> str:
        """Describe what is wrong with the files of the splits (default: all); empty if nothing is.

        This reads all of the files once.
        """
        for split in splits or (self.train, self.held_out):
            blocks = (self._block_problem(name, sums) for name, _, sums in split.files(self.dtype))
            spans = (span.problem() for span in split.in_place)
            if found := self._size_problem(split) or next(filter(None, chain(blocks, spans)), ""):
                return found
        return ""

    def _size_problem(self, split: Split) -> str:
        for name, size, _ in split.files(self.dtype):
            try:
                found = (Path(self.folder) / name).stat().st_size
            except OSError as error:
                return f"{name}: {error.strerror}"
            if found != size:
                return f"{name} has {found:,} bytes, not {size:,}"
        is_gone = split.origin and not (Path(self.folder) / FILES).is_file()
        return f"{FILES} is not there" if is_gone else ""

    def _block_problem(self, name: str, blocks: tuple[int, ...]) -> str:
        """Describe which blocks of a file fail their checksum; empty if none does."""
        try:
            stream = (Path(self.folder) / name).open("rb")
        except OSError as error:
            return f"{name}: {error.strerror}"
        with stream:
            found = tuple(zlib.crc32(block) for block in read_blocks(stream))
        if found == blocks:
            return ""
        pairs = enumerate(zip(found, blocks, strict=False))
        wrong = [number for number, (now, then) in pairs if now != then]
        return (
            f"{len(wrong):,} of {len(found):,} blocks of {name} have other checksums, the "
            f"first at byte {wrong[0] * BLOCK_BYTES if wrong else 0:,}"
        )

    @classmethod
    def of(cls, record: dict[str, Any]) -> Corpus:
        """Parse a record.

        Raises:
            ValueError, TypeError or KeyError: The record is invalid.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"its format is {record.get('format')}, not {FORMAT}")
        splits = {name: _parse_split(record[name]) for name in ("train", "held_out")}
        return cls(**{**record, **splits, "classes": tuple(record.get("classes", ()))})

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read a record."""
        try:
            return cls.of(json.loads(path.read_bytes()))
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise RunStateError(
            f"{path} does not say what the corpus is: {problem}",
            hint="remove it: a resume finds out again, and compares with the checkpoints",
        )


def read_corpus(folder: Path) -> tuple[Corpus | None, str]:
    """Return the corpus of a folder if it is intact, else None and the problem.

    The problem is empty if the folder has no corpus.
    """
    record = folder / "corpus.json"
    if not record.exists():
        return None, ""
    try:
        corpus = replace(Corpus.load(record), folder=str(folder))
    except TrainctlError as error:
        return None, error.message
    problem = corpus.problem()
    if not problem and corpus.digest != digest_of_splits(corpus):
        problem = "corpus.json does not agree with itself"
    return (None, problem) if problem else (corpus, "")


def read_blocks(stream: BufferedReader) -> Iterator[memoryview]:
    """Yield the rest of a file, `BLOCK_BYTES` at a time. Each block overwrites the previous one."""
    buffer = memoryview(bytearray(BLOCK_BYTES))  # reused: allocation costs as much as CRC-32
    while size := stream.readinto(buffer):
        yield buffer[:size]


def digest_of_splits(corpus: Corpus) -> str:
    """Return the SHA-256 over the tokens, the sizes and the roles of both splits."""
    splits = {
        name: [split.tokens, split.documents, split.sha256]
        for name, split in (("train", corpus.train), ("held_out", corpus.held_out))
    }
    marks: list[Any] = ["marked"] if corpus.is_marked else []
    marks += [corpus.classes] if corpus.classes else []
    text = json.dumps([corpus.dtype, corpus.end_of_document, splits, *marks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _parse_split(data: dict[str, Any]) -> Split:
    if not data["ends"]:
        raise ValueError("it does not say where documents end")
    blocks = {name: tuple(data.get(name, ())) for name in _BLOCKS}
    spans = tuple(Span(**span) for span in data.get("in_place", ()))
    return Split(**{**data, **blocks, "in_place": spans})
