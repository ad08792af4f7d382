"""The corpora of a run, one per source, by name, and by which files they differ. No torch.

The only source of a run is named `plan.mixture.SINGLE_SOURCE`. Its record is stored as in versions
without mixtures: `corpus.json` is that corpus itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainctl.config.schema import DataConfig, DataExecutor, RunConfig
from trainctl.data.cache_files import ignore_message
from trainctl.data.corpus import CorpusBuilder, build_users_corpus, can_tokenize_in_parts
from trainctl.data.corpus_record import FILES, Corpus
from trainctl.data.executors import executor_of
from trainctl.data.streaming.corpora import open_remote_corpora
from trainctl.data.tasks import OnPreparation, PreparationProgress
from trainctl.data.tokenizer import Encoder, Tokenizer, encoder_of
from trainctl.errors import RunStateError, TrainctlError
from trainctl.plans.mixture import SINGLE_SOURCE, sources_of
from trainctl.readers.check import with_source_keys
from trainctl.readers.files import split_files
from trainctl.readers.remote import Notify
from trainctl.runs.files import write_json
from trainctl.runs.records import ignore_progress

_AT_ONCE = 1 << 20
"""Tokens of both corpora that are compared at once."""


def describe_changed_files(
    before: Corpus, now: Corpus, section: DataConfig | None, read_at: float
) -> str:
    """Name the first file that differs, with what is known of it; empty if nothing is known.

    Args:
        section: The source of `now`. Without the tokens of `before` its files that were written
            since `read_at` are named.
        read_at: Time at which the run last read the files, in seconds.
    """
    try:
        found = [*_differing_files(before, now)]
    except (TrainctlError, OSError, ValueError, IndexError):  # the cache has lost it
        found = []
    found = found or [*_written_since(section, read_at)]
    more = f", and {len(found) - 1:,} more files differ" if len(found) > 1 else ""
    return found[0] + more if found else ""


def _differing_files(before: Corpus, now: Corpus) -> Iterator[str]:
    """Yield what differs of each file: its presence, its size, or else the first other text."""
    old, new = _sizes(before), _sizes(now)
    is_known = bool(old and new)
    yield from (f"{file} is gone" for file in old if is_known and file not in new)
    yield from (f"{file} is new" for file in new if is_known and file not in old)
    equal = 0
    for file in old:
        if file in new and old[file] != new[file]:
            documents, tokens = new[file]
            yield (
                f"{file} has {documents:,} documents of {tokens:,} tokens, and had "
                f"{old[file][0]:,} of {old[file][1]:,}"
            )
        equal += old[file] == new.get(file)
    if is_known and equal == len(old) == len(new):
        yield from _first_other_text(before, now)


def _sizes(corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Return documents and tokens of each file; empty if the corpus has no origins."""
    origins = [(split, corpus.origin(split)) for split in (corpus.train, corpus.held_out)]
    if any(origin is None for split, origin in origins if split.documents):
        return {}
    files = json.loads((Path(corpus.folder) / FILES).read_bytes())
    sizes = np.zeros((2, len(files)), dtype=np.int64)
    for split, origin in origins:
        if origin is not None and len(origin):
            lengths = np.diff(corpus.ends(split).astype(np.int64), prepend=0)
            numbers = origin["file"].astype(np.int64)
            sizes[0] += np.bincount(numbers, minlength=len(files))
            sizes[1] += np.bincount(numbers, lengths, len(files)).astype(np.int64)
    return {str(file): (int(d), int(t)) for file, d, t in zip(files, *sizes, strict=True)}


def _first_other_text(before: Corpus, now: Corpus) -> Iterator[str]:
    """Yield the place of the first document with other ids."""
    files = json.loads((Path(now.folder) / FILES).read_bytes())
    for old, new in ((before.train, now.train), (before.held_out, now.held_out)):
        left, right = before.stored(old), now.stored(new)
        for start in range(0, min(old.tokens, new.tokens), _AT_ONCE):
            a, b = left[start : start + _AT_ONCE], right[start : start + _AT_ONCE]
            size = min(len(a), len(b))
            if (others := np.flatnonzero(a[:size] != b[:size])).size:
                place = start + int(others[0])
                document = int(np.searchsorted(now.ends(new), np.uint64(place), side="right"))
                origin = now.origin(new)
                assert origin is not None
                file, line = origin[document].tolist()
                yield f"{files[file]}{f':{line}' if line else ''} has other text"
                return


def _written_since(section: DataConfig | None, read_at: float) -> Iterable[str]:
    try:
        files = split_files(section) if section is not None else None
    except TrainctlError:
        return
    for file in (*files.train, *files.held_out) if files is not None else ():
        if isinstance(file, Path) and file.stat().st_mtime > read_at:
            yield f"{file} was written after the run had read it"


Corpora = dict[str, Corpus]

_EXAMPLES = 10
"""Maximum number of examples of bad text in a record, over all sources."""

_NO_TEXT = "see what is in the files, and that the text is where data looks for it (data.text_key)"


class _TotalProgress:
    """Progress callback over several sources: adds the documents of finished sources."""

    def __init__(self, progress: OnPreparation) -> None:
        self._progress, self._before, self._last = progress, 0, 0

    def start_source(self) -> None:
        self._before, self._last = self._before + self._last, 0

    def __call__(self, progress: PreparationProgress) -> None:
        if progress.is_tokenizing:
            self._last = progress.documents
            progress = replace(progress, documents=self._before + self._last)
        self._progress(progress)


def _corpus_builders(
    config: RunConfig, tokenizer: Tokenizer, progress: OnPreparation = ignore_progress, **rest: Any
) -> Iterator[tuple[str, CorpusBuilder]]:
    """Yield a builder for each source; `rest` are further fields of it."""
    total = _TotalProgress(progress)
    for name, section in sources_of(config.data).items():
        total.start_source()
        yield (
            name,
            CorpusBuilder(
                config=section,
                tokenizer=tokenizer,
                run_data=config.data,
                name=name,
                progress=total,
                tokenizer_section=config.tokenizer,
                **rest,
            ),
        )


def build_corpora(
    config: RunConfig,
    tokenizer: Tokenizer,
    progress: OnPreparation = ignore_progress,
    notify: Notify = ignore_message,
    *,
    users_folder: Path | None = None,
    workers: int | None = None,
) -> Corpora:
    """Return the corpora of a run, each from the cache if it is there. Sources are built in turn.

    `users_folder` is the run's folder for the texts of `data.factory`, `workers` as in
    `executor_of`. The other arguments are as in `CorpusBuilder`.
    """
    if config.data.factory is not None:
        assert users_folder is not None
        made = build_users_corpus(config.data, tokenizer, users_folder, progress, notify)
        _require_text(made, "data.factory gives", encoder_of(config.data, tokenizer))
        return {SINGLE_SOURCE: made}
    found = {}
    rest = {"notify": notify, "executor": executor_of(config, workers)}
    for name, builder in _corpus_builders(config, tokenizer, progress, **rest):
        with naming_source(config.data, name):
            found[name] = builder.build()
            encoder = encoder_of(builder.config, tokenizer)
            _require_text(found[name], "the files of data.paths have", encoder)
    return found


def _require_text(corpus: Corpus, who: str, encoder: Encoder) -> None:
    """Refuse a corpus without text.

    Raises:
        TrainctlError: There are no documents, or all are empty. The message has the counts.
    """
    train, held_out = corpus.train, corpus.held_out
    documents = train.documents + held_out.documents
    if documents == 0:
        skipped = corpus.bad_text.get("skipped", 0)
        why = f": data.on_bad_text=skip left out {skipped:,}" if skipped else ""
        raise TrainctlError(f"{who} 0 documents{why}", hint=_NO_TEXT)
    around = len(encoder.begin_of_document) + (corpus.end_of_document is not None)
    if train.documents and train.tokens == around * train.documents and not train.in_place:
        raise TrainctlError(
            f"{train.documents:,} of {train.documents:,} documents to train on are empty",
            hint=_NO_TEXT,
        )


def cached_corpora(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Corpus | None]:
    """Return each source's corpus from the cache, None if it is not there. No text is read."""
    found = {}
    for name, builder in _corpus_builders(config, tokenizer):
        with naming_source(config.data, name):
            found[name] = builder.cached()
    return found


def tokenize_shares(
    config: RunConfig,
    tokenizer: Tokenizer,
    share: tuple[int, int],
    progress: OnPreparation = ignore_progress,
    *,
    workers: int | None = None,
) -> int:
    """Tokenize one share of each source without assembling corpora: one job of a job array.

    `share` is the share's number, from 1, and the number of shares.

    Returns:
        Number of tasks of all sources that other jobs still have to do.

    Raises:
        TrainctlError: As `build_corpora`; or a source's text cannot be divided into tasks.
    """
    left = 0
    executor = executor_of(config, workers)
    for name, builder in _corpus_builders(config, tokenizer, progress, executor=executor):
        with naming_source(config.data, name):
            left += builder.tokenize_share(*share)
    return left


def tokenize_unclaimed(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Tokenize tasks that no process has claimed yet, for a process that assembles the corpora.

    An executor with machines of its own needs no such help.
    """
    if config.data.executor is not DataExecutor.local:
        return
    for _, builder in _corpus_builders(config, tokenizer):
        if builder.cached() is None and can_tokenize_in_parts(builder.config):
            builder.tokenize_share(1, 1)


@contextmanager
def naming_source(data: DataConfig, name: str) -> Iterator[None]:
    """Rewrite the keys in an error of a source to their place under `data.sources.NAME`."""
    try:
        yield
    except TrainctlError as error:
        if not data.sources:
            raise
        moved = partial(with_source_keys, name, data.sources[name])
        raise TrainctlError(
            f"data.sources.{name}: {moved(error.message)}",
            hint=moved(error.hint),
            exit_code=error.exit_code,
            findings=[
                replace(
                    each, key=moved(each.key), message=moved(each.message), hint=moved(each.hint)
                )
                for each in error.findings
            ],
        ) from error


def save_corpora(path: Path, corpora: Mapping[str, Corpus]) -> None:
    """Write a run's record of its corpora."""
    if set(corpora) == {SINGLE_SOURCE}:
        write_json(path, corpora[SINGLE_SOURCE].to_plain())
    else:
        sources = {name: corpus.to_plain() for name, corpus in corpora.items()}
        write_json(path, {"sources": sources})


def load_corpora(path: Path, data: DataConfig) -> Corpora:
    """Return the corpora of a configuration's sources from a run's record.

    Raises:
        TrainctlError: The record is invalid, or lacks a source (exit code 5).
    """
    found = load_recorded_corpora(path)
    missing = [name for name in sources_of(data) if name not in found]
    if missing:
        raise RunStateError(
            f"{path.parent} has not read the text of {', '.join(missing)} yet",
            hint="it does when its next attempt starts",
        )
    return open_remote_corpora(data, {name: found[name] for name in sources_of(data)})


def load_recorded_corpora(path: Path) -> Corpora:
    """Return every corpus in a run's record, including sources that the run no longer has."""
    try:
        sources = json.loads(path.read_bytes())["sources"]
        return {name: Corpus.of(record) for name, record in sources.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {SINGLE_SOURCE: Corpus.load(path)}  # a run with one source, or an error


def corpus_digests(corpora: Mapping[str, Corpus]) -> dict[str, Any]:
    """Return the corpus digests that a checkpoint records."""
    if set(corpora) == {SINGLE_SOURCE}:
        return {"corpus_digest": corpora[SINGLE_SOURCE].digest}
    of_each = {name: corpus.digest for name, corpus in sorted(corpora.items())}
    together = hashlib.sha256(json.dumps(of_each).encode()).hexdigest()
    return {"corpus_digest": together, "source_digests": of_each}


def changed_sources(corpora: Mapping[str, Corpus], manifest: Mapping[str, Any]) -> list[str]:
    """Return the sources whose text differs from the text that a checkpoint was trained on.

    An imported checkpoint has an empty digest: its text is not known.
    """
    digests = manifest.get("source_digests") or {SINGLE_SOURCE: manifest["corpus_digest"]}
    return [
        name
        for name, digest in digests.items()
        if digest and name in corpora and digest != corpora[name].digest
    ]


def require_unchanged_corpora(
    corpora: Mapping[str, Corpus], path: Path, data: DataConfig | None = None
) -> Corpora:
    """Check that corpora are unchanged since the run started, and return them.

    The result also has the recorded corpora of sources that the run no longer has. The run's record
    at `path` may not exist yet. `data` is the run's section.

    Raises:
        TrainctlError: A corpus has changed (exit code 5); names the file if it can be known.
    """
    if not path.is_file():
        return dict(corpora)
    before = load_recorded_corpora(path)
    for name, corpus in corpora.items():
        if name in before and corpus.digest != before[name].digest:
            which = "corpus" if name == SINGLE_SOURCE else f"corpus of data.sources.{name}"
            section = sources_of(data).get(name) if data is not None else None
            read_at = path.stat().st_mtime
            found = describe_changed_files(before[name], corpus, section, read_at)
            raise RunStateError(
                f"the {which} is not the one that this run started with"
                + (f": {found}" if found else ""),
                hint="restore the files, or start a new run from this run's weights",
            )
    return {**before, **corpora}


def unigram_entropy(corpora: Mapping[str, Corpus]) -> float:
    """Return the unigram entropy per source, in nats, averaged over sources.

    This is the loss of a model that knows the source and its token frequencies. Sources are
    weighted by held-out tokens, as in a run's held-out loss.
    """
    (first, *_), of = corpora.values(), sum(each.held_out.tokens for each in corpora.values())
    if len(corpora) == 1 or not of:
        return first.unigram_entropy
    return sum(each.unigram_entropy * each.held_out.tokens for each in corpora.values()) / of


def bad_text(corpora: Mapping[str, Corpus]) -> dict[str, Any]:
    """Sum the accounts of bad text over sources, with some examples; empty if there was none."""
    found = [corpus.bad_text for corpus in corpora.values() if corpus.bad_text]
    if len(found) < 2:
        return found[0] if found else {}
    return {
        "replaced": sum(each["replaced"] for each in found),
        "skipped": sum(each["skipped"] for each in found),
        "examples": [text for each in found for text in each["examples"]][:_EXAMPLES],
    }
