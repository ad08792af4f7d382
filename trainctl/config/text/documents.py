"""The documents of a corpus: as its kind reads them, what is done with bad text, and their sides.

`data.on_bad_text` decides:

- `error`: the file and line are named, and nothing is tokenized.
- `replace`: U+FFFD stands in for bytes that are not UTF-8, for halves of UTF-16 surrogate pairs,
  and for NULs of a text file. A JSONL line without a text is an error still: nothing could stand
  in for it.
- `skip`: the document is left out; so is a line that is not JSON, is nested too deeply, or has no
  text under `data.text_key`.

A file that is no text at all is an error whatever the policy. What was replaced and left out is
counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

from trainctl.config.registry import function_of
from trainctl.config.schema import DataConfig, OnBadText
from trainctl.config.text.files import TextFiles
from trainctl.config.text.remote import File
from trainctl.config.text.stall_notice import told_if_silent
from trainctl.errors import TrainctlError

EXAMPLES = 10
"""Places of bad text that are kept by name."""

_SURROGATES = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
"""Stands where something is no text."""

_POLICY_HINT = (
    "correct it, or set data.on_bad_text=replace (U+FFFD in its place) or skip (leaves the "
    "document out)"
)
_LINE_HINT = "correct the line, or set data.on_bad_text=skip, which leaves such lines out"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and where it is."""

    text: str
    """All of it; encodes as UTF-8."""
    file: File
    """That it is in."""
    line: int | None
    """Its line, or row, from 1; None of a file that is one document."""


@dataclass(slots=True)
class BadText:
    """What was bad in the text that was read."""

    replaced: int = 0
    """Documents in which U+FFFD stands for something."""
    skipped: int = 0
    """Documents and lines left out."""
    examples: list[str] = field(default_factory=list)
    """The first places, and what is wrong there."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.skipped)


class Reader:
    """Reads the documents of files as their kind does, and judges text by the policy.

    Args:
        config: The kind with its keys, and the policy.

    Attributes:
        config: The same.
        bad: What was bad so far.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.bad = BadText()

    def documents(self, files: Sequence[File]) -> Iterator[Document]:
        """Yield the documents of files, in order.

        Raises:
            TrainctlError: A file cannot be read or is no text; or, by the policy, bad text.
        """
        for file in files:
            yield from self.read(file)

    def read(self, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
        """Yield the documents of a file, or of one of the ranges that its source gives for it.

        Raises:
            TrainctlError: As `documents`.
        """
        read = function_of("data", self.config.kind)
        with _readable(file), told_if_silent(file) as wait:
            for document in read(self, file) if span is None else read(self, file, span):
                wait(False)
                yield document
                wait(True)

    def clean(self, text: str, where: str) -> str | None:
        """Return a text as it can be encoded; None to leave it out.

        Args:
            text: That may have lone surrogates in it.
            where: What it is, for the account and for errors.
        """
        try:
            if not text.isascii():
                text.encode()  # several times as fast as looking for them
            return text
        except UnicodeEncodeError as error:
            problem = f"a lone surrogate, U+{ord(text[error.start]):04X}, is not text"
            return self.judge(where, problem, _SURROGATES.sub(REPLACEMENT, text))

    def decoded(self, raw: bytes, where: str, *, whole: bool = False) -> str | None:
        """Return the text of bytes; None to leave it out.

        Args:
            raw: The bytes.
            where: What they are, for the account and for errors.
            whole: Whether they are a whole file, of which an error names the line.
        """
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if whole:
                line = raw.count(b"\n", 0, error.start) + 1
                where = f"{where}:{line}"
            problem = f"byte 0x{raw[error.start]:02x} is not UTF-8"
            return self.judge(where, problem, raw.decode(errors="replace"))

    def judge(self, where: str, problem: str, repaired: str | None = None) -> str | None:
        """What to take in place of a bad text, by the policy; None to leave it out.

        Args:
            where: What it is, for the account and for errors.
            problem: What is wrong there.
            repaired: The text with U+FFFD in its place; None where nothing could stand in for it.

        Raises:
            TrainctlError: By the policy.
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


def sides(config: DataConfig, files: TextFiles, reader: Reader) -> Iterator[tuple[str, Document]]:
    """Yield each document with the side that it is on, `held_out` or `train`; each side in file
    order.

    `data.max_bytes` bounds each side; of a single file, which is divided, the two together.

    Raises:
        TrainctlError: As `Reader.documents`.
    """
    if not files.by_document:
        for name, of_side in (("held_out", files.held_out), ("train", files.train)):
            for document in _bounded(reader.documents(of_side), config.max_bytes):
                yield name, document
        return

    def documents(by: Reader) -> Iterator[Document]:
        return _bounded(by.documents(files.train), config.max_bytes)

    if is_one_document(config, files):
        (only,) = documents(reader)
        yield from _cut(only, config.held_out_fraction)
        return
    places = (_place(document) for document in documents(Reader(config)))
    limit = limit_of(places, config.held_out_fraction)
    for document in documents(reader):
        yield "held_out" if _place(document) <= limit else "train", document


def is_one_document(config: DataConfig, files: TextFiles) -> bool:
    """Whether the single file of a corpus is a single document, whose end is held out.

    Raises:
        TrainctlError: As `Reader.documents`.
    """
    if not files.by_document:
        return False
    documents = _bounded(Reader(config).documents(files.train), config.max_bytes)
    return len(list(islice(documents, 2))) == 1


def limit_of(places: Iterable[int], fraction: float) -> int:
    """Return the highest place of a held-out document: at least one is, and at least one is not.

    A document's place is a function of its text, so that adding some moves no other and two of the
    same text are on the same side. The lowest and the highest of them decide.
    """
    lowest, highest = 1 << 64, -1
    for place in places:
        lowest, highest = min(lowest, place), max(highest, place)
    return min(max(int(fraction * 2**64), lowest), highest - 1)


def _place(document: Document) -> int:
    """Return a number below 2^64."""
    return int.from_bytes(sha256(document.text.encode()).digest()[:8], "big")


def _cut(document: Document, fraction: float) -> Iterator[tuple[str, Document]]:
    """The only document's end held out: cut at the end of a line, if there is one."""
    text = document.text
    at = len(text) - round(len(text) * fraction)
    at = text.rfind("\n", 0, at) + 1 or at
    yield "held_out", Document(text[at:], document.file, document.line)
    yield "train", Document(text[:at], document.file, document.line)


def _bounded(documents: Iterator[Document], room: int | None) -> Iterator[Document]:
    """Yield the documents, up to so many bytes of text."""
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
def _readable(file: File) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainctlError(f"cannot read {file}: {error.strerror}") from None
