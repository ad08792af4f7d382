"""Write a tokenized corpus atomically: its folder appears when it is complete. No torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import DataConfig
from trainctl.data.cache_files import convert_write_errors
from trainctl.data.corpus_record import (
    BLOCK_BYTES,
    ENDS,
    FILES,
    ORIGIN,
    Corpus,
    Split,
    digest_of_splits,
)
from trainctl.data.store import StorePart, TokenStore, files_in_order, shift_line_number
from trainctl.data.targets import NO_TARGETS, TARGET, TargetLayout
from trainctl.data.tasks import OnPreparation, PreparationProgress, Task
from trainctl.data.token_arrays import Span, digest_of_spans, marked_vocab_size, without_marks
from trainctl.data.tokenizer import Encoder, Tokenizer, dtype_for, encode_documents
from trainctl.readers.documents import EXAMPLES, BadText, held_out_places, held_out_threshold
from trainctl.readers.files import TextFiles
from trainctl.readers.remote import File
from trainctl.runs.files import sync_directory, write_json
from trainctl.runs.records import ignore_progress


def write_corpus(
    folder: Path,
    tokenizer: Tokenizer,
    store_chunks: Iterable[Chunk],
    bad: Callable[[], BadText],
    files: Sequence[File] = (),
    facts: Mapping[str, Any] | None = None,
    *,
    is_marked: bool = False,
    targets: TargetLayout = NO_TARGETS,
    keeps_records: bool = False,
) -> None:
    """Write tokens into a folder, which replaces an existing one.

    Everything is synced before the folder is renamed to its final name. On an error the unfinished
    folder is removed.

    Args:
        chunks: Documents; chunks of the two splits may alternate.
        bad: Returns the account of bad text; called after the last chunk.
        files: The files that the chunks number; empty if chunks have no file numbers.
        facts: Other files of the folder, by name, as plain JSON.
        is_marked: Whether ids carry loss marks (`data.token_arrays`).
        keeps_records: Whether chunks have a line of JSON for each document.

    Raises:
        TrainctlError: Whatever making the chunks raises, or the folder cannot be written (exit code
            4).
    """
    temporary = folder.with_suffix(".tmp")
    try:
        with convert_write_errors(folder):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        corpus = _write_temporary(
            folder,
            temporary,
            tokenizer,
            store_chunks,
            has_origin=bool(files),
            is_marked=is_marked,
            targets=targets,
            keeps_records=keeps_records,
        )
        account = bad()
        with convert_write_errors(folder):
            if files:
                write_json(temporary / FILES, [str(file) for file in files])
            for name, plain in (facts or {}).items():
                write_json(temporary / name, plain)
            write_json(
                temporary / "corpus.json",
                replace(corpus, bad_text=asdict(account) if account else {}).to_plain(),
            )
            _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def tokenize_chunks(
    texts: Iterable[tuple[str, str]], tokenizer: Encoder, progress: OnPreparation = ignore_progress
) -> Iterator[Chunk]:
    """Tokenize texts in this process and yield each as a chunk of its own.

    Each text comes with its split, `train` or `held_out`. `progress` is called after each text.
    """
    for done, (split, _, ids) in enumerate(encode_documents(texts, tokenizer), 1):
        yield Chunk(split, ids, np.array([len(ids)]))
        progress(PreparationProgress(done))


def _write_temporary(
    folder: Path,
    temporary: Path,
    tokenizer: Tokenizer,
    store_chunks: Iterable[Chunk],
    has_origin: bool,
    is_marked: bool,
    targets: TargetLayout,
    keeps_records: bool,
) -> Corpus:
    vocab_size = tokenizer.vocab_size
    dtype = dtype_for(marked_vocab_size(vocab_size) if is_marked else vocab_size)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    has = {"origin": has_origin, "targets": targets.width, "records": keeps_records}
    endings = ["bin", "ends", *(ending for ending, is_there in has.items() if is_there)]
    with ExitStack() as stack:
        splits = {}
        for split in ("train", "held_out"):
            paths = {ending: temporary / f"{split}.{ending}" for ending in endings}
            files = {e: stack.enter_context(_checked_file(p, folder)) for e, p in paths.items()}
            splits[split] = _SplitWriter(split, files, targets.width)
        for chunk in store_chunks:
            splits[chunk.split].add(chunk, dtype)
            if chunk.split == "train":
                ids = without_marks(chunk.ids) if is_marked else chunk.ids
                counts += np.bincount(ids, minlength=len(counts))
        train, held_out = splits["train"].finish(), splits["held_out"].finish()
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
        classes=targets.classes,
    )
    return replace(corpus, digest=digest_of_splits(corpus))


@dataclass(slots=True)
class _CheckedFile:
    """A file that is hashed while it is written."""

    stream: IO[bytes]
    folder: Path
    sha256: Any = field(default_factory=hashlib.sha256)
    blocks: list[int] = field(default_factory=list)
    """CRC-32 of each full block; complete after `finish`."""
    _in_block: int = 0
    _checksum: int = 0

    def write(self, raw: memoryview) -> None:
        with convert_write_errors(self.folder):
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
        with convert_write_errors(self.folder):
            self.stream.flush()
            os.fsync(self.stream.fileno())
        if self._in_block:
            self._close_block()

    def _close_block(self) -> None:
        self.blocks.append(self._checksum)
        self._in_block = self._checksum = 0


@dataclass(slots=True)
class _SplitWriter:
    name: str
    files: Mapping[str, _CheckedFile]
    """Files by their endings: bin, ends, and origin, targets and records if the corpus has them."""
    target_width: int
    records_bytes: int = 0
    tokens: int = 0
    documents: int = 0
    spans: list[Span] = field(default_factory=list)

    def add(self, chunk: Chunk, dtype: str) -> None:
        if chunk.span is not None:
            self.spans.append(chunk.span)
        else:
            ids = np.ascontiguousarray(chunk.ids, dtype=dtype)
            self.files["bin"].write(ids.view(np.uint8).data)
        self.files["ends"].write(memoryview((chunk.ends + self.tokens).astype(ENDS).tobytes()))
        if "origin" in self.files:
            found = np.empty(len(chunk.ends), dtype=ORIGIN)
            found["file"], found["line"] = chunk.files, chunk.lines
            self.files["origin"].write(memoryview(found.tobytes()))
        if "targets" in self.files:
            assert chunk.targets is not None
            self.files["targets"].write(memoryview(chunk.targets.astype(TARGET).tobytes()))
        if "records" in self.files:
            self.files["records"].write(memoryview(chunk.records))
            self.records_bytes += len(chunk.records)
        self.tokens += len(chunk.ids) if chunk.span is None else chunk.span.tokens
        self.documents += len(chunk.ends)

    def finish(self) -> Split:
        """Sync the files and return the record of the split."""
        for file in self.files.values():
            file.finish()
        sums = {ending: file.sha256 for ending, file in self.files.items()}
        digest = sums["bin"].hexdigest()
        if self.spans:
            digest = digest_of_spans(self.spans, sums["ends"].hexdigest())
        beside = [sums[ending].digest() for ending in ("targets", "records") if ending in sums]
        if beside:
            digest = hashlib.sha256(b"".join([sums["bin"].digest(), *beside])).hexdigest()
        ids, *others = self.files
        columns: dict[str, Any] = {ending: f"{self.name}.{ending}" for ending in others}
        columns |= {f"{ending}_blocks": tuple(self.files[ending].blocks) for ending in others}
        return Split(
            file="" if self.spans else f"{self.name}.{ids}",
            tokens=self.tokens,
            documents=self.documents,
            sha256=digest,
            blocks=tuple(self.files[ids].blocks),
            in_place=tuple(self.spans),
            target_width=self.target_width,
            records_bytes=self.records_bytes,
            **columns,
        )


@contextmanager
def _checked_file(path: Path, folder: Path) -> Iterator[_CheckedFile]:
    with convert_write_errors(folder):
        stream = path.open("wb")
    try:
        yield _CheckedFile(stream, folder)
    finally:
        with suppress(OSError):  # a full disk, already reported
            stream.close()


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive documents of one split."""

    split: str
    ids: npt.NDArray[np.integer]
    ends: npt.NDArray[np.integer]
    """End of each document, in tokens of the chunk."""
    files: npt.NDArray[np.integer] | None = None
    """Index of each document's file among the corpus's files; None if there are none."""
    lines: npt.NDArray[np.integer] | None = None
    """Line of each document in its file, from 1; 0 if the file is the document."""
    span: Span | None = None
    """Location of tokens that stay in place; `ids` are then a sample of them, for counting."""
    targets: npt.NDArray[np.float32] | None = None
    """Targets of each document, (documents, width); None if the corpus has none."""
    records: bytes = b""
    """A line of JSON for each document; empty if the corpus keeps none."""


def store_chunks(
    store: TokenStore,
    tasks: Sequence[Task],
    files: TextFiles,
    config: DataConfig,
    keep: Mapping[str, npt.NDArray[np.bool_]] | None = None,
    targets: TargetLayout = NO_TARGETS,
) -> Iterator[Chunk]:
    """Yield all documents of the tasks, in order within each split.

    Args:
        files: Which file is in which split, or that documents are split.
        config: The source's section, with the choice of held-out documents.
        keep: Mask of documents to keep, [documents], by task key; None keeps all.
        targets: Layout of the targets of all tasks together.
    """
    numbers = {file: n for n, file in enumerate(files_in_order(files.train, files.held_out))}
    before: dict[File, int] = {}
    splits = held_out_masks(store, tasks, files, config)
    for task, held_out in zip(tasks, splits, strict=True):
        part = store.part(task)
        origin = part.origin()
        pieces = origin["piece"]
        kept = keep[task.key] if keep is not None else np.ones(len(pieces), dtype=np.bool_)
        file_of = np.array([numbers[piece.file] for piece in task.pieces])[pieces]
        skipped = np.array([before.get(piece.file, 0) for piece in task.pieces])[pieces]
        line_of = origin["line"] + np.where(origin["line"], skipped, 0)
        ids, ends = part.ids(), part.ends().astype(np.int64)
        records = part.records()
        rows = targets.align(part.target_rows(), part.targets)
        for split, chosen in (("held_out", held_out & kept), ("train", ~held_out & kept)):
            if chosen.any():
                yield Chunk(
                    split,
                    *_select_documents(ids, ends, chosen),
                    file_of[chosen],
                    line_of[chosen],
                    targets=rows[chosen],
                    records=b"".join(compress(records, chosen)),
                )
        for piece, facts in zip(task.pieces, part.pieces, strict=True):
            before[piece.file] = before.get(piece.file, 0) + facts.lines


def held_out_masks(
    store: TokenStore, tasks: Sequence[Task], files: TextFiles, config: DataConfig
) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield the mask of held-out documents of each task, [documents].

    Arguments are as in `store_chunks`.
    """
    held_out_files = set(files.held_out)
    limit = _held_out_limit(store, tasks, config) if files.by_document else None
    for task in tasks:
        part = store.part(task)
        if limit is not None:
            yield _places(part, config) <= np.uint64(limit)
        else:
            of_piece = np.array([piece.file in held_out_files for piece in task.pieces])
            yield of_piece[part.origin()["piece"]]


def bad_text(store: TokenStore, tasks: Sequence[Task], files: TextFiles) -> BadText:
    """Return the account of bad text in the tasks, examples of held-out files first."""
    of_sides = {True: BadText(), False: BadText()}
    held_out_files = set(files.held_out)
    before: dict[File, int] = {}
    for task in tasks:
        for piece, facts in zip(task.pieces, store.part(task).pieces, strict=True):
            bad = of_sides[piece.file in held_out_files]
            bad.replaced += facts.replaced
            bad.skipped += facts.skipped
            lines = before.get(piece.file, 0)
            bad.examples += [
                f"{piece.file}{shift_line_number(text, piece, lines)}" for text in facts.examples
            ]
            before[piece.file] = lines + facts.lines
    held_out, train = of_sides[True], of_sides[False]
    return BadText(
        held_out.replaced + train.replaced,
        held_out.skipped + train.skipped,
        [*held_out.examples, *train.examples][:EXAMPLES],
    )


def _select_documents(
    ids: npt.NDArray[np.integer], ends: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    if chosen.all():
        return ids, ends
    lengths = np.diff(ends, prepend=0)
    return ids[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen])


def _places(part: StorePart, config: DataConfig) -> npt.NDArray[np.uint64]:
    """Return the places of documents, by the first 8 bytes of their hashes."""
    first = np.ascontiguousarray(part.hashes()[:, :8])
    return held_out_places(first.view(">u8").reshape(-1).astype(np.uint64), config.held_out_seed)


def _held_out_limit(store: TokenStore, tasks: Sequence[Task], config: DataConfig) -> int:
    places = (_places(store.part(task), config) for task in tasks)
    extremes = [int(end) for each in places if len(each) for end in (each.min(), each.max())]
    return max(
        0, held_out_threshold(extremes, config.held_out_fraction)
    )  # below 0 if there are no documents
