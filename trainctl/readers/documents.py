"""Documents of a corpus: reading, the policy for bad text, and the split into train and held-out.

`data.on_bad_text` is the policy:

- `error`: the file and line are named, and nothing is tokenized.
- `replace`: U+FFFD replaces bytes that are not UTF-8, halves of UTF-16 surrogate pairs, and NULs of
  a text file. A JSONL line without a text is still an error, because nothing could replace it.
- `skip`: the document is left out; so is a line that is not JSON, is nested too deeply, or has no
  text under `data.text_key`.

A binary file is always an error. Replaced and skipped documents are counted.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar, cast

from trainctl.config.registry import function_of
from trainctl.config.schema import DataConfig, OnBadText
from trainctl.config.secrets import redact_text
from trainctl.errors import TrainctlError
from trainctl.readers.files import TextFiles
from trainctl.readers.remote import File, print_notice

EXAMPLES = 10
"""Maximum places of bad text that are recorded."""

_SURROGATES = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
"""Character that replaces what is no text."""

_POLICY_HINT = (
    "correct it, or set data.on_bad_text=replace (U+FFFD in its place) or skip (leaves the "
    "document out)"
)
_64_BITS = (1 << 64) - 1
_LINE_HINT = "correct the line, or set data.on_bad_text=skip, which leaves such lines out"


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its place."""

    text: str
    """The whole text; it can be encoded as UTF-8."""
    file: File
    line: int | None
    """Line or row in the file, from 1; None if the file is one document."""


@dataclass(slots=True)
class BadText:
    """Counts and examples of bad text in the documents that were read."""

    replaced: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    """First places of bad text, each with its problem."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.skipped)


class Reader:
    """Reader of documents, by the section's kind and its policy for bad text.

    `bad` counts the bad text that was read so far.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.bad = BadText()

    def documents(self, files: Sequence[File]) -> Iterator[Document]:
        """Yield the documents of files, in order.

        Raises:
            TrainctlError: A file cannot be read or is binary; or, by the policy, bad text.
        """
        for file in files:
            yield from self.read(file)

    def read(self, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
        """Yield the documents of a file, or of one of the ranges into which its kind divides it."""
        read = function_of("data", self.config.kind)
        with _convert_read_errors(file), warn_if_stalled(file) as wait:
            for document in read(self, file) if span is None else read(self, file, span):
                wait(False)
                yield document
                wait(True)

    def clean(self, text: str, where: str) -> str | None:
        """Check a text for lone surrogates by the policy; None leaves it out."""
        try:
            if not text.isascii():
                text.encode()  # several times faster than a search
            return text
        except UnicodeEncodeError as error:
            problem = f"a lone surrogate, U+{ord(text[error.start]):04X}, is not text"
            return self.apply_bad_text_policy(where, problem, _SURROGATES.sub(REPLACEMENT, text))

    def decoded(self, raw: bytes, where: str, *, whole: bool = False) -> str | None:
        """Decode bytes as UTF-8 by the policy; None leaves the text out.

        Args:
            whole: Whether the bytes are a whole file, so that errors name the line.
        """
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if whole:
                line = raw.count(b"\n", 0, error.start) + 1
                where = f"{where}:{line}"
            problem = f"byte 0x{raw[error.start]:02x} is not UTF-8"
            return self.apply_bad_text_policy(where, problem, raw.decode(errors="replace"))

    def apply_bad_text_policy(
        self, where: str, problem: str, repaired: str | None = None
    ) -> str | None:
        """Return the replacement for a bad text by the policy; None leaves it out.

        Args:
            repaired: The text repaired with U+FFFD; None if it cannot be repaired.
        """
        skips = self.config.on_bad_text is OnBadText.skip
        if self.config.on_bad_text is OnBadText.error or (repaired is None and not skips):
            hint = _LINE_HINT if repaired is None else _POLICY_HINT
            raise TrainctlError(f"{where}: {problem}", hint=hint)
        if len(self.bad.examples) < EXAMPLES:
            self.bad.examples.append(f"{where}: {problem}")
        if skips:
            self.bad.skipped += 1
            return None
        self.bad.replaced += 1
        return repaired


def split_documents(
    config: DataConfig, files: TextFiles, reader: Reader
) -> Iterator[tuple[str, Document]]:
    """Yield each document with its split, `held_out` or `train`; each split in file order.

    `data.max_bytes` limits each split; if documents are held out, it limits both together.
    """
    if not files.by_document:
        for name, its_files in (("held_out", files.held_out), ("train", files.train)):
            for document in _limit_bytes(reader.documents(its_files), config.max_bytes):
                yield name, document
        return

    def documents(by: Reader) -> Iterator[Document]:
        return _limit_bytes(by.documents(files.train), config.max_bytes)

    if is_one_document(config, files):
        (only,) = documents(reader)
        yield from _split_single_document(only, config.held_out_fraction)
        return

    def place(document: Document) -> int:
        return held_out_places(_text_hash(document), config.held_out_seed)

    limit = held_out_threshold(map(place, documents(Reader(config))), config.held_out_fraction)
    for document in documents(reader):
        yield "held_out" if place(document) <= limit else "train", document


def is_one_document(config: DataConfig, files: TextFiles) -> bool:
    """Whether a single document is read, so that its end is held out."""
    if not files.by_document or (len(files.train) > 1 and config.max_bytes is None):
        return False
    documents = _limit_bytes(Reader(config).documents(files.train), config.max_bytes)
    return len(list(islice(documents, 2))) == 1


def held_out_threshold(places: Iterable[int], fraction: float) -> int:
    """Return the highest place of a held-out document; each split gets at least one document.

    A document's place is a function of its text (`held_out_places`). Adding documents therefore
    moves no other, and equal texts are in the same split. The lowest and the highest place bound
    the limit.
    """
    lowest, highest = 1 << 64, -1
    for place in places:
        lowest, highest = min(lowest, place), max(highest, place)
    return min(max(int(fraction * 2**64), lowest), highest - 1)


HashOrHashes = TypeVar("HashOrHashes", bound=Any)


def held_out_places(hashes: HashOrHashes, seed: int) -> HashOrHashes:
    """Return the places of documents by hashes of 64 bits: a number, or numpy's array of them.

    They are the hashes, which each seed but 0 permutes by the finalizer of splitmix64.
    """
    if seed == 0:
        return hashes
    mixed: Any = hashes ^ (seed * 0x9E3779B97F4A7C15 & _64_BITS)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _64_BITS
    return cast(HashOrHashes, mixed ^ (mixed >> 31))


def held_out_choice(config: DataConfig, files: TextFiles) -> str:
    """Return what the choice of held-out documents depends on; empty if none are chosen."""
    if not files.by_document:
        return ""
    seed = f" {config.held_out_seed}" if config.held_out_seed else ""
    return f"{config.held_out_fraction}{seed}"


def _text_hash(document: Document) -> int:
    """Return a hash of the text, below 2^64."""
    return int.from_bytes(sha256(document.text.encode()).digest()[:8], "big")


def _split_single_document(document: Document, fraction: float) -> Iterator[tuple[str, Document]]:
    """Split the only document, holding out its end; the cut is at the end of a line if possible."""
    text = document.text
    at = len(text) - round(len(text) * fraction)
    at = text.rfind("\n", 0, at) + 1 or at
    yield "held_out", Document(text[at:], document.file, document.line)
    yield "train", Document(text[:at], document.file, document.line)


def _limit_bytes(documents: Iterator[Document], room: int | None) -> Iterator[Document]:
    """Yield documents up to `room` bytes of text in total, cutting the last one."""
    for document in documents:
        if room is None:
            yield document
            continue
        raw = document.text.encode()[:room]
        room -= len(raw)
        yield Document(raw.decode(errors="ignore"), document.file, document.line)
        if room == 0:
            return


@contextmanager
def _convert_read_errors(file: File) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainctlError(f"cannot read {file}: {error.strerror}") from None


SILENT_SECONDS = 30.0
"""Seconds without a document before a notice, and between two notices."""


class _StallWatch:
    """Files that this process waits for, and the thread that watches while there are any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[object, tuple[File, float]] = {}
        self.thread: threading.Thread | None = None

    def wait_for(self, key: object, file: File) -> None:
        with self.lock:
            self.waiting[key] = file, time.monotonic()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True)
                self.thread.start()

    def stop_waiting(self, key: object) -> None:
        with self.lock:
            self.waiting.pop(key, None)

    def _run(self) -> None:
        while True:
            time.sleep(SILENT_SECONDS)
            with self.lock:
                if not self.waiting:
                    self.thread = None
                    return
                waiting = [*self.waiting.values()]
            now = time.monotonic()
            for file, since in waiting:
                if now - since >= SILENT_SECONDS:
                    seconds = f"{now - since:.0f} s"
                    print_notice(
                        redact_text(f"still reading {file}: nothing has come for {seconds}")
                    )


_watch = _StallWatch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # its thread is not there


@contextmanager
def warn_if_stalled(file: File) -> Iterator[Callable[[bool], None]]:
    """Print a notice while a file yields nothing.

    Yields a function: call it with False when something has arrived, and with True before waiting
    for the next item.
    """
    key = object()

    def wait(is_waiting: bool) -> None:
        if is_waiting:
            _watch.wait_for(key, file)
        else:
            _watch.stop_waiting(key)

    wait(True)
    try:
        yield wait
    finally:
        wait(False)
