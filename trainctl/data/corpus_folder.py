"""Write a tokenized corpus atomically: its folder appears when it is complete. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainctl.data.assembly import Chunk
from trainctl.data.corpus_file import (
    BLOCK_BYTES,
    ENDS,
    FILES,
    FORMAT,
    ORIGIN,
    Corpus,
    Split,
    blocks_of,
    digest_of_splits,
)
from trainctl.data.encoding import Encoder, dtype_for, encoded
from trainctl.data.loss_marks import marked_vocab_size, without_marks
from trainctl.data.part import writing
from trainctl.data.progress import PreparationProgress, Progress, ignore_progress
from trainctl.data.token_spans import Span, digest_of_spans
from trainctl.data.tokenizer import Tokenizer
from trainctl.readers.documents import BadText
from trainctl.readers.remote import File
from trainctl.runs.access import open_lock
from trainctl.runs.atomic import sync_directory, write_json


@contextmanager
def locked(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Lock a corpus folder, which need not exist, so that no other process writes it meanwhile.

    `tell` is called with a sentence before waiting for another process.

    Raises:
        TrainctlError: The parent folder cannot be written (exit code 4).
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder.with_suffix(".lock"))
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
            tell(f"waiting for {holder}, which tokenizes the same text into {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with writing(folder):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def write_corpus(
    folder: Path,
    tokenizer: Tokenizer,
    chunks: Iterable[Chunk],
    bad: Callable[[], BadText],
    files: Sequence[File] = (),
    facts: Mapping[str, Any] | None = None,
    *,
    is_marked: bool = False,
) -> None:
    """Write tokens into a folder, which replaces an existing one.

    Everything is synced before the folder is renamed to its final name. On an error the unfinished
    folder is removed.

    Args:
        chunks: Documents; chunks of the two sides may alternate.
        bad: Returns the account of bad text; called after the last chunk.
        files: The files that the chunks number; empty if chunks have no file numbers.
        facts: Other files of the folder, by name, as plain JSON.
        is_marked: Whether ids carry loss marks (`data.loss_marks`).

    Raises:
        TrainctlError: Whatever making the chunks raises, or the folder cannot be written (exit code
            4).
    """
    temporary = folder.with_suffix(".tmp")
    try:
        with writing(folder):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        corpus = _written(
            folder, temporary, tokenizer, chunks, has_origin=bool(files), is_marked=is_marked
        )
        account = bad()
        with writing(folder):
            if files:
                write_json(temporary / FILES, [str(file) for file in files])
            for name, plain in (facts or {}).items():
                write_json(temporary / name, plain)
            write_json(
                temporary / "corpus.json",
                asdict(replace(corpus, bad_text=asdict(account) if account else {})),
            )
            _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def chunks_of(
    texts: Iterable[tuple[str, str]], tokenizer: Encoder, progress: Progress = ignore_progress
) -> Iterator[Chunk]:
    """Tokenize texts in this process and yield each as a chunk of its own.

    Each text comes with its side, `train` or `held_out`. `progress` is called after each text.
    """
    for done, (side, _, ids) in enumerate(encoded(texts, tokenizer), 1):
        yield Chunk(side, ids, np.array([len(ids)]))
        progress(PreparationProgress(done))


def _written(
    folder: Path,
    temporary: Path,
    tokenizer: Tokenizer,
    chunks: Iterable[Chunk],
    has_origin: bool,
    is_marked: bool,
) -> Corpus:
    vocab_size = tokenizer.vocab_size
    dtype = dtype_for(marked_vocab_size(vocab_size) if is_marked else vocab_size)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with ExitStack() as stack:

        def opened(name: str) -> _CheckedFile:
            return stack.enter_context(_checked_file(temporary / name, folder))

        sides = {
            side: _Side(
                side,
                opened(f"{side}.bin"),
                opened(f"{side}.ends"),
                opened(f"{side}.origin") if has_origin else None,
            )
            for side in ("train", "held_out")
        }
        for chunk in chunks:
            sides[chunk.side].add(chunk, dtype)
            if chunk.side == "train":
                ids = without_marks(chunk.ids) if is_marked else chunk.ids
                counts += np.bincount(ids, minlength=len(counts))
        train, held_out = sides["train"].split(), sides["held_out"].split()
    shares = counts[counts > 0] / max(1, counts.sum())
    corpus = Corpus(
        folder=str(folder),
        dtype=dtype,
        end_of_document=tokenizer.end_of_document,
        train=train,
        held_out=held_out,
        unigram_entropy=float(-(shares * np.log(shares)).sum()),
        digest="",
        is_marked=is_marked,
    )
    return replace(corpus, digest=digest_of_splits(corpus))


@dataclass(slots=True)
class _CheckedFile:
    """A file that is hashed while it is written."""

    stream: IO[bytes]
    folder: Path
    """Corpus folder, for errors."""
    sha256: Any = field(default_factory=hashlib.sha256)
    """Hash of everything written so far."""
    blocks: list[int] = field(default_factory=list)
    """CRC-32 of each full block; complete after `finish`."""
    _in_block: int = 0
    _checksum: int = 0

    def write(self, raw: memoryview) -> None:
        """Append bytes."""
        with writing(self.folder):
            self.stream.write(raw)
        self.sha256.update(raw)
        while raw:
            part = raw[: BLOCK_BYTES - self._in_block]
            self._checksum = zlib.crc32(part, self._checksum)
            self._in_block += len(part)
            raw = raw[len(part) :]
            if self._in_block == BLOCK_BYTES:
                self._close_block()

    def finish(self) -> None:
        """Sync the file and close the last block."""
        with writing(self.folder):
            self.stream.flush()
            os.fsync(self.stream.fileno())
        if self._in_block:
            self._close_block()

    def _close_block(self) -> None:
        self.blocks.append(self._checksum)
        self._in_block = self._checksum = 0


@dataclass(slots=True)
class _Side:
    """One side of a corpus while it is written."""

    name: str
    ids: _CheckedFile
    ends: _CheckedFile
    origin: _CheckedFile | None
    tokens: int = 0
    documents: int = 0
    spans: list[Span] = field(default_factory=list)

    def add(self, chunk: Chunk, dtype: str) -> None:
        """Append documents."""
        if chunk.span is not None:
            self.spans.append(chunk.span)
        else:
            ids = np.ascontiguousarray(chunk.ids, dtype=dtype)
            self.ids.write(ids.view(np.uint8).data)
        self.ends.write(memoryview((chunk.ends + self.tokens).astype(ENDS).tobytes()))
        if self.origin is not None:
            found = np.empty(len(chunk.ends), dtype=ORIGIN)
            found["file"], found["line"] = chunk.files, chunk.lines
            self.origin.write(memoryview(found.tobytes()))
        self.tokens += len(chunk.ids) if chunk.span is None else chunk.span.tokens
        self.documents += len(chunk.ends)

    def split(self) -> Split:
        """Sync the files and return the record of the side."""
        for file in (self.ids, self.ends, self.origin):
            if file is not None:
                file.finish()
        in_place = tuple(self.spans)
        digest = digest_of_spans(in_place, self.ends.sha256.hexdigest()) if in_place else ""
        return Split(
            f"{self.name}.bin" if not in_place else "",
            self.tokens,
            self.documents,
            digest or self.ids.sha256.hexdigest(),
            tuple(self.ids.blocks),
            f"{self.name}.ends",
            tuple(self.ends.blocks),
            f"{self.name}.origin" if self.origin is not None else "",
            tuple(self.origin.blocks) if self.origin is not None else (),
            in_place,
        )


@contextmanager
def _checked_file(path: Path, folder: Path) -> Iterator[_CheckedFile]:
    with writing(folder):
        stream = path.open("wb")
    try:
        yield _CheckedFile(stream, folder)
    finally:
        with suppress(OSError):  # a full disk, already reported
            stream.close()


def migrate(folder: Path, tell: Callable[[str], None]) -> None:
    """Add today's checksums to a corpus of format 1, if it matches its digest.

    Raises:
        TrainctlError: The record cannot be written (exit code 4).
    """
    record = folder / "corpus.json"
    if not record.is_file():
        return
    old = replace(Corpus.load(record), folder=str(folder))
    if old.format >= FORMAT or old.digest != old.digest_of_format_1():
        return
    new = replace(
        old,
        train=_with_checksums(folder, old.train),
        held_out=_with_checksums(folder, old.held_out),
        format=FORMAT,
    )
    tell(f"{folder} is in an older format: giving it checksums")
    with writing(folder):
        write_json(record, asdict(replace(new, digest=digest_of_splits(new))))


def _with_checksums(folder: Path, split: Split) -> Split:
    digest, blocks = hashlib.sha256(), []
    with (folder / split.file).open("rb") as stream:
        for block in blocks_of(stream):
            digest.update(block)
            blocks.append(zlib.crc32(block))
    return replace(split, sha256=digest.hexdigest(), blocks=tuple(blocks))


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Publish the folder by a rename. Readers that have mapped the old files keep them."""
    sync_directory(temporary)
    damaged = folder.with_suffix(".damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    if folder.exists():
        folder.rename(damaged)
    temporary.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(damaged, ignore_errors=True)
