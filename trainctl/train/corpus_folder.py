"""Writing a tokenized corpus so that it is there whole or not at all. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trainctl.config.text.documents import BadText
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.access import open_lock
from trainctl.runs.atomic import sync_directory, write_json
from trainctl.train.corpus_file import (
    BLOCK_BYTES,
    FORMAT,
    Corpus,
    Split,
    blocks_of,
    digest_of_splits,
)
from trainctl.train.tokenizer import Tokenizer

AT_ONCE = 4 << 20
"""Characters of text that are tokenized together: work for every core, and little memory."""


@contextmanager
def locked(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Within it no other process makes this folder.

    Args:
        folder: Of a corpus, perhaps not there yet.
        tell: Called with a sentence where another process has to be waited for.

    Raises:
        TrainctlError: Its parent cannot be written (exit code 4).
    """
    with _writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder.with_suffix(".lock"))
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
            tell(f"waiting for {holder}, which tokenizes the same text into {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with _writing(folder):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def write_corpus(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Iterator[tuple[str, str]],
    bad: BadText,
    progress: Callable[[int], None] | None,
) -> None:
    """Tokenize texts into a folder, which takes the place of one that is there.

    Everything is synced before the folder has its name; what was begun is removed on an error.

    Args:
        folder: To make.
        tokenizer: Of the run.
        texts: Each with its side, `train` or `held_out`; the sides may be mixed.
        bad: The account of bad text, complete when the texts have ended.
        progress: Called with the number of documents done.

    Raises:
        TrainctlError: Whatever reading the texts raises, or the folder cannot be written (exit
            code 4).
    """
    temporary = folder.with_suffix(".tmp")
    try:
        with _writing(folder):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        corpus = _tokenized(folder, temporary, tokenizer, texts, progress)
        with _writing(folder):
            write_json(
                temporary / "corpus.json",
                asdict(replace(corpus, bad_text=asdict(bad) if bad else {})),
            )
            _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenized(
    folder: Path,
    temporary: Path,
    tokenizer: Tokenizer,
    texts: Iterator[tuple[str, str]],
    progress: Callable[[int], None] | None,
) -> Corpus:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with _token_file(temporary, folder, "train") as train:
        with _token_file(temporary, folder, "held_out") as held_out:
            files = {"train": train, "held_out": held_out}
            for done, (side, ids) in enumerate(_encoded(texts, tokenizer), 1):
                files[side].add(ids, dtype)
                if side == "train":
                    counts += np.bincount(ids, minlength=len(counts))
                if progress is not None:
                    progress(done)
    shares = counts[counts > 0] / max(1, counts.sum())
    corpus = Corpus(
        folder=str(folder),
        dtype=dtype,
        end_of_document=tokenizer.end_of_document,
        train=train.split,
        held_out=held_out.split,
        unigram_entropy=float(-(shares * np.log(shares)).sum()),
        digest="",
    )
    return replace(corpus, digest=digest_of_splits(corpus))


def _encoded(
    texts: Iterator[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Each text's side and ids, its end among them, in the order of the texts."""
    end = tokenizer.end_of_document
    for together in _together(texts):
        encoded = tokenizer.encode_all([text for _, text in together])
        for (side, _), ids in zip(together, encoded, strict=True):
            yield side, ids if end is None else np.append(ids, end)


def _together(texts: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Texts in groups of `AT_ONCE` characters; a longer one is a group of its own."""
    group: list[tuple[str, str]] = []
    size = 0
    for side, text in texts:
        group.append((side, text))
        size += len(text)
        if size >= AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass(slots=True)
class _TokenFile:
    """A file of tokens while it is written.

    Attributes:
        stream: The file.
        folder: Whose corpus it is of, for errors.
        split: What it is so far; its checksums only when it is finished.
    """

    stream: IO[bytes]
    folder: Path
    split: Split
    _digest: Any = field(default_factory=hashlib.sha256)
    _blocks: list[int] = field(default_factory=list)
    _in_block: int = 0
    _checksum: int = 0

    def add(self, ids: npt.NDArray[np.int64], dtype: str) -> None:
        """A document's tokens."""
        raw = memoryview(ids.astype(dtype).tobytes())
        with _writing(self.folder):
            self.stream.write(raw)
        self._digest.update(raw)
        while raw:
            part = raw[: BLOCK_BYTES - self._in_block]
            self._checksum = zlib.crc32(part, self._checksum)
            self._in_block += len(part)
            raw = raw[len(part) :]
            if self._in_block == BLOCK_BYTES:
                self._close_block()
        was = self.split
        self.split = replace(was, tokens=was.tokens + len(ids), documents=was.documents + 1)

    def finish(self) -> None:
        """Sync it, and give the split its checksums."""
        with _writing(self.folder):
            self.stream.flush()
            os.fsync(self.stream.fileno())
        if self._in_block:
            self._close_block()
        self.split = replace(
            self.split, sha256=self._digest.hexdigest(), blocks=tuple(self._blocks)
        )

    def _close_block(self) -> None:
        self._blocks.append(self._checksum)
        self._in_block = self._checksum = 0


@contextmanager
def _token_file(temporary: Path, folder: Path, side: str) -> Iterator[_TokenFile]:
    name = f"{side}.bin"
    with _writing(folder):
        stream = (temporary / name).open("wb")
    try:
        file = _TokenFile(stream, folder, Split(name, 0, 0))
        yield file
        file.finish()
    finally:
        with suppress(OSError):  # what a full disk did not take; that has been said already
            stream.close()


def migrate(folder: Path, tell: Callable[[str], None]) -> None:
    """Give a corpus of format 1 the checksums of today, if it is what its digest says.

    Raises:
        TrainctlError: Its record cannot be written (exit code 4).
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
    with _writing(folder):
        write_json(record, asdict(replace(new, digest=digest_of_splits(new))))


def _with_checksums(folder: Path, split: Split) -> Split:
    digest, blocks = hashlib.sha256(), []
    with (folder / split.file).open("rb") as stream:
        for block in blocks_of(stream):
            digest.update(block)
            blocks.append(zlib.crc32(block))
    return replace(split, sha256=digest.hexdigest(), blocks=tuple(blocks))


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give the folder its name; who has files of the one before mapped keeps them."""
    sync_directory(temporary)
    damaged = folder.with_suffix(".damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    if folder.exists():
        folder.rename(damaged)
    temporary.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(damaged, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What goes wrong within it is the disk's, or that of its permissions."""
    try:
        yield
    except OSError as error:
        raise TrainctlError(
            f"cannot write the tokenized corpus, {folder}: {error.strerror or error}",
            hint="free space there, or name another folder in TRAINCTL_CACHE_DIR",
            exit_code=ExitCode.environment,
        ) from None
