"""Statistics of a corpus: documents, tokens, lengths and duplicates of each source. No torch."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import RunConfig
from trainctl.data.cache_files import cache_folder, convert_write_errors
from trainctl.data.corpus_record import Corpus
from trainctl.data.executors import Executor, ExecutorTask, executor_of, require_results
from trainctl.data.prepare import prepared_corpora
from trainctl.data.token_arrays import Tokens
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.plans.mixture import sources_of
from trainctl.runs.records import OnUnits, ignore_progress

PERCENTILES = (10, 50, 90, 99)
SAMPLED = 256
"""Number of documents, from all over a source, that the bytes per token are measured on."""
MOST_SAMPLED = 4096
"""Maximum number of tokens measured per document."""

Decode = Callable[[list[int]], str]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SourceText:
    """Text of a source to compute statistics of."""

    tokens: Tokens
    ends: npt.NDArray[np.uint64]
    held_out_documents: int
    held_out_tokens: int
    record: Path | None = None
    """`corpus.json` of the text, for tasks in other processes."""


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Statistics of a source's training text."""

    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    bytes_per_token: float | None
    """UTF-8 bytes per token, from documents all over the source; None if there are none."""
    mean_length: float
    percentiles: Mapping[int, int]
    longest: int
    lengths: Mapping[int, int]
    """Histogram of document lengths: key n, a power of two, counts lengths above n / 2 up to n
    tokens.
    """
    copies: int
    """Number of documents with the same tokens as an earlier one, in this or an earlier
    source.
    """


def corpus_statistics(
    config: RunConfig, progress: OnUnits = ignore_progress
) -> dict[str, SourceStatistics]:
    """Compute statistics of each source's tokens, on the executor of a configuration.

    Text that the cache lacks is tokenized first.

    Raises:
        TrainctlError: A text cannot be read, or is not in files of its own (`data.factory`,
            `data=stream`).
    """
    tokenizer = load_tokenizer(config.tokenizer)
    texts = _source_texts(config, tokenizer)
    with TemporaryDirectory(
        prefix="statistics-", dir=cache_folder(), ignore_cleanup_errors=True
    ) as folder:
        hashes = _hash_in_tasks(texts, executor_of(config), Path(folder), progress)
    return statistics_of(texts, tokenizer.decode, hashes)


def _source_texts(config: RunConfig, tokenizer: Tokenizer) -> dict[str, SourceText]:
    if config.data.factory is not None:
        raise TrainctlError("data.factory gives its texts when a run starts, and no earlier")
    for name, section in sources_of(config.data).items():
        if section.kind == "stream":
            raise TrainctlError(
                f"the text of {name} lies elsewhere, and all of it would be fetched to count it",
                hint="trainctl data stats of the configuration that it was prepared with",
            )
    found = {}
    for name, corpus in prepared_corpora(config, tokenizer).items():
        ends = corpus.ends(corpus.train)
        held_out = corpus.held_out
        tokens = corpus.tokens(corpus.train)
        record = Path(corpus.folder) / "corpus.json"
        found[name] = SourceText(tokens, ends, held_out.documents, held_out.tokens, record)
    return found


_RANGE_TOKENS = 1 << 26
"""Tokens that one task reads."""


def _hash_in_tasks(
    sources: Mapping[str, SourceText], executor: Executor, folder: Path, progress: OnUnits
) -> dict[str, Hashes]:
    files: dict[str, list[Path]] = {}
    tasks, sizes = [], {}
    for number, (name, source) in enumerate(sources.items()):
        assert source.record is not None
        bounds = _bounds_of(source)
        steps = np.arange(_RANGE_TOKENS, len(source.tokens), _RANGE_TOKENS)
        edges = sorted({0, *np.searchsorted(bounds, steps).tolist(), len(bounds) - 1})
        files[name] = []
        for between in pairwise(edges):
            file = folder / f"{number}-{between[0]}.npy"
            files[name].append(file)
            size = int(bounds[between[1]] - bounds[between[0]])
            sizes[file.name] = size
            tasks.append(
                ExecutorTask(file.name, partial(_write_hashes, source.record, between, file), size)
            )
    whole = sum(sizes.values())

    def done(task: ExecutorTask) -> None:
        del sizes[task.name]
        progress(whole - sum(sizes.values()), whole)

    executor.run(tasks, done)
    names = [task.name for task in tasks]
    require_results(executor, names, lambda name: (folder / name).is_file(), folder)
    return {
        name: np.concatenate(
            [np.empty(0, np.uint64), *(np.load(file, allow_pickle=False) for file in some)]
        )
        for name, some in files.items()
    }


def _write_hashes(record: Path, between: tuple[int, int], file: Path) -> None:
    corpus = replace(Corpus.load(record), folder=str(record.parent))
    source = SourceText(corpus.tokens(corpus.train), corpus.ends(corpus.train), 0, 0)
    bounds = _bounds_of(source)[between[0] : between[1] + 1]
    temporary = file.with_suffix(f".{secrets.token_hex(4)}.tmp")
    with convert_write_errors(file.parent):
        with temporary.open("wb") as stream:
            np.save(stream, document_hashes(source.tokens, bounds))
        temporary.replace(file)


def _bounds_of(source: SourceText) -> npt.NDArray[np.int64]:
    """Return the bounds of the documents in tokens, [documents + 1]."""
    return np.concatenate([[0], np.asarray(source.ends[:], dtype=np.int64)])


def statistics_of(
    sources: Mapping[str, SourceText],
    decode: Decode,
    hashes: Mapping[str, Hashes],
) -> dict[str, SourceStatistics]:
    """Compute statistics of each source, with the hashes of its documents.

    A document is a copy if an earlier one of the same source, or of an earlier source in the
    mapping, has the same tokens.
    """
    found: dict[str, SourceStatistics] = {}
    seen: Hashes = np.empty(0, dtype=np.uint64)
    for name, source in sources.items():
        every = np.concatenate([seen, hashes[name]])
        seen = np.unique(every)
        found[name] = _statistics_of_source(source, decode, copies=len(every) - len(seen))
    return found


def _statistics_of_source(source: SourceText, decode: Decode, *, copies: int) -> SourceStatistics:
    bounds = _bounds_of(source)
    lengths = np.diff(bounds)
    some = len(lengths) > 0
    levels = np.percentile(lengths, PERCENTILES, method="inverted_cdf") if some else ()
    return SourceStatistics(
        documents=len(lengths),
        tokens=len(source.tokens),
        held_out_documents=source.held_out_documents,
        held_out_tokens=source.held_out_tokens,
        bytes_per_token=_bytes_per_token(source.tokens, bounds, decode),
        mean_length=float(lengths.mean()) if some else 0.0,
        percentiles={level: int(at) for level, at in zip(PERCENTILES, levels, strict=False)},
        longest=int(lengths.max()) if some else 0,
        lengths=_by_powers(lengths),
        copies=copies,
    )


def document_hashes(tokens: Tokens, bounds: npt.NDArray[np.int64]) -> Hashes:
    """Return a 64-bit hash of the tokens of each document that is not empty."""
    found = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end > start:
            ids = np.ascontiguousarray(tokens[start:end], dtype=np.uint32)
            found.append(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
    return np.frombuffer(b"".join(found), dtype=np.uint64)


def _bytes_per_token(tokens: Tokens, bounds: npt.NDArray[np.int64], decode: Decode) -> float | None:
    size = count = 0
    places = np.linspace(0, len(bounds) - 2, min(SAMPLED, len(bounds) - 1)).astype(int)
    for place in np.unique(places):
        start, end = int(bounds[place]), int(bounds[place + 1])
        ids = tokens[start : min(end, start + MOST_SAMPLED)].tolist()
        size += len(decode(ids).encode())
        count += len(ids)
    return size / count if count else None


def _by_powers(lengths: npt.NDArray[np.int64]) -> dict[int, int]:
    """Count documents by the smallest power of two that is at least their length, ascending."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return {1 << int(power): int((powers == power).sum()) for power in np.unique(powers)}
