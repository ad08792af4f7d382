"""The documents of a corpus's files, and what is done where one cannot be read as text.

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

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path

from trainctl.config.schema import DataConfig, OnBadText
from trainctl.config.suggest import nearest
from trainctl.config.text.files import HEAD_BYTES, TextFiles, no_text
from trainctl.errors import TrainctlError

EXAMPLES = 10
"""Places of bad text that are kept by name."""

_KEYS_SHOWN = 6
_BOM = b"\xef\xbb\xbf"
_SURROGATES = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_POLICY_HINT = (
    "correct it, or set data.on_bad_text=replace (U+FFFD in its place) or skip (leaves the "
    "document out)"
)
_LINE_HINT = "correct the line, or set data.on_bad_text=skip, which leaves such lines out"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and where it is.

    Attributes:
        text: All of it; encodes as UTF-8.
        file: That it is in.
        line: Its line in a JSONL file, from 1; None of any other, which is one document.
    """

    text: str
    file: Path
    line: int | None


@dataclass(slots=True)
class BadText:
    """What was bad in the text that was read.

    Attributes:
        replaced: Documents in which U+FFFD stands for something.
        skipped: Documents and lines left out.
        examples: The first places, and what is wrong there.
    """

    replaced: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.replaced or self.skipped)


class NoTextKey(TrainctlError):
    """A JSONL line without a text under `data.text_key`.

    Args:
        where: The line.
        text_key: What was looked for.
        record: What is there.
    """

    def __init__(self, where: str, text_key: str, record: dict[str, object]) -> None:
        texts = {key: value for key, value in record.items() if isinstance(value, str)}
        # A slip of the pen, or another name: the longest is likeliest to be what is meant.
        keys = sorted(texts, key=lambda key: len(texts[key]), reverse=True)
        meant = nearest(text_key, keys, count=1) or keys[:1]
        has = f"it has texts under {_listed(keys)}"
        hint = f"data.text_key={meant[0]}" if meant else "write the text under one key"
        if not keys:
            has = f"its keys are {_listed(list(record))}, with no text" if record else "it is empty"
        super().__init__(f"{where}: no text under {text_key!r}: {has}", hint=hint)


class Reader:
    """Reads documents, by the policy of a configuration.

    Args:
        config: The key of the text, and the policy.

    Attributes:
        bad: What was bad so far.
    """

    def __init__(self, config: DataConfig) -> None:
        self._text_key = config.text_key
        self._policy = config.on_bad_text
        self.bad = BadText()

    def documents(self, files: list[Path]) -> Iterator[Document]:
        """The documents of files, in order.

        Raises:
            TrainctlError: A file cannot be read or is no text; or, by the policy, bad text.
        """
        for file in files:
            with _readable(file):
                yield from self._lines(file) if file.suffix == ".jsonl" else self._whole(file)

    def clean(self, text: str, where: str) -> str | None:
        """A text as it can be encoded; None to leave it out.

        Args:
            text: That may have lone surrogates in it.
            where: What it is, for the account and for errors.
        """
        found = _SURROGATES.search(text)
        if found is None:
            return text
        problem = f"a lone surrogate, U+{ord(found[0]):04X}, is not text"
        return self._judge(where, problem, _SURROGATES.sub(_REPLACEMENT, text))

    def problem_of(self, raw: bytes, file: str) -> TrainctlError | None:
        """What ends the reading of a text file's bytes; None if nothing does."""
        try:
            self._decoded(raw, file, whole=True)
        except TrainctlError as error:
            return error
        return None

    def _whole(self, file: Path) -> Iterator[Document]:
        raw = file.read_bytes()
        _refuse_binary(file, raw[:HEAD_BYTES])
        text = self._decoded(raw.removeprefix(_BOM), str(file), whole=True)
        if text is not None and "\x00" in text:
            where = f"{file}:{_line_of(text, text.index(chr(0)))}"
            text = self._judge(where, "a NUL is not text", text.replace("\x00", _REPLACEMENT))
        if text is not None:
            yield Document(text.replace("\r\n", "\n").replace("\r", "\n"), file, None)

    def _lines(self, file: Path) -> Iterator[Document]:
        with file.open("rb") as stream:
            _refuse_binary(file, stream.read(HEAD_BYTES))
            stream.seek(0)
            for number, raw in enumerate(stream, 1):
                line = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
                if not line:
                    continue
                text = self.text_of_line(line, f"{file}:{number}")
                if text is not None:
                    yield Document(text, file, number)

    def text_of_line(self, raw: bytes, where: str) -> str | None:
        """The text of a JSONL line; None to leave the line out.

        Args:
            raw: The line.
            where: Its file and number.

        Raises:
            TrainctlError: By the policy.
        """
        before = self.bad.replaced
        line = self._decoded(raw, where)
        if line is None:
            return None
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            return self._judge(where, f"not JSON: {error.msg} at column {error.colno}", None)
        except RecursionError:
            return self._judge(where, "not read: JSON nested too deeply", None)
        except ValueError as error:  # an integer of thousands of digits
            return self._judge(where, f"not read: {error}", None)
        text = record.get(self._text_key) if isinstance(record, dict) else None
        if isinstance(text, str):
            text = self.clean(text, where)
            self.bad.replaced = min(self.bad.replaced, before + 1)  # a document counts once
            return text
        if self._policy is OnBadText.skip:
            return self._judge(where, f"no text under {self._text_key!r}", None)
        if not isinstance(record, dict):
            return self._judge(where, f"a JSON {_json_type(record)}, not an object", None)
        raise NoTextKey(where, self._text_key, record)

    def _decoded(self, raw: bytes, where: str, *, whole: bool = False) -> str | None:
        """The text of bytes; of a `whole` file, an error names the line."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if whole:
                line = raw.count(b"\n", 0, error.start) + 1
                where = f"{where}:{line}"
            problem = f"byte 0x{raw[error.start]:02x} is not UTF-8"
            return self._judge(where, problem, raw.decode(errors="replace"))

    def _judge(self, where: str, problem: str, repaired: str | None) -> str | None:
        """What to take in place of a bad text, by the policy; None to leave it out."""
        skips = self._policy is OnBadText.skip
        if self._policy is OnBadText.error or (repaired is None and not skips):
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
    """Each document with the side that it is on, `held_out` or `train`; each side in file order.

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

    first = list(islice(documents(Reader(config)), 2))
    if len(first) == 1:
        (only,) = documents(reader)
        yield from _cut(only, config.held_out_fraction)
        return
    limit = _limit(documents(Reader(config)), config.held_out_fraction)
    for document in documents(reader):
        yield "held_out" if _place(document) <= limit else "train", document


def _limit(documents: Iterator[Document], fraction: float) -> int:
    """The highest place of a held-out document: at least one is, and at least one is not.

    A document's place is a function of its text, so that adding some moves no other and two of the
    same text are on the same side.
    """
    lowest, highest = 1 << 64, -1
    for document in documents:
        place = _place(document)
        lowest, highest = min(lowest, place), max(highest, place)
    return min(max(int(fraction * 2**64), lowest), highest - 1)


def _place(document: Document) -> int:
    """A number below 2^64."""
    return int.from_bytes(sha256(document.text.encode()).digest()[:8], "big")


def _cut(document: Document, fraction: float) -> Iterator[tuple[str, Document]]:
    """The only document's end held out: cut at the end of a line, if there is one."""
    text = document.text
    at = len(text) - round(len(text) * fraction)
    at = text.rfind("\n", 0, at) + 1 or at
    yield "held_out", Document(text[at:], document.file, document.line)
    yield "train", Document(text[:at], document.file, document.line)


def _bounded(documents: Iterator[Document], room: int | None) -> Iterator[Document]:
    """The documents, up to so many bytes of text."""
    for document in documents:
        if room is None:
            yield document
            continue
        raw = document.text.encode()[:room]
        room -= len(raw)
        yield Document(raw.decode(errors="ignore"), document.file, document.line)
        if room == 0:
            return


def _refuse_binary(file: Path, head: bytes) -> None:
    found = no_text(head)
    if found is not None:
        kind, hint = found
        raise TrainctlError(f"{file} is {kind}, not text", hint=hint.replace("FILE", str(file)))


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainctlError(f"cannot read {file}: {error.strerror}") from None


def _listed(keys: list[str]) -> str:
    """The first few of them, as they are typed."""
    more = [f"{len(keys) - _KEYS_SHOWN} more"] if len(keys) > _KEYS_SHOWN else []
    return ", ".join([*(repr(key) for key in keys[:_KEYS_SHOWN]), *more])


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "literal", type(None): "literal"}
    return names.get(type(value), "number")
