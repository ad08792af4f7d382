"""The tokenized corpus: built once before the ranks start, then memory-mapped. No torch.

A corpus is a folder of the cache with `train.bin` and `held_out.bin` (token ids, little endian,
documents concatenated), `train.ends` and `held_out.ends` (where each document ends) and
`corpus.json` (sizes and checksums). The checksums are verified before every start. A damaged corpus
is assembled again from the store of its parts (`trainctl.data`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainctl.config.registry import function_of
from trainctl.config.schema import DataConfig, TokenizerConfig
from trainctl.data.cache_files import (
    cache_folder,
    convert_write_errors,
    ignore_message,
    lock_folder,
)
from trainctl.data.corpus_record import FORMAT, Corpus, Split, read_corpus
from trainctl.data.corpus_writer import (
    bad_text,
    store_chunks,
    tokenize_chunks,
    write_corpus,
)
from trainctl.data.document_selection import (
    DROPPED,
    KeptDocuments,
    TokenizedSource,
    columns_folder,
    select_training_documents,
    selection_digest,
)
from trainctl.data.executors import INLINE, LOCAL, Executor, LocalExecutor
from trainctl.data.pretokenized_corpus import chunks_in_place
from trainctl.data.store import DamagedPart, TokenStore, files_in_order
from trainctl.data.targets import KeptRecords, TargetLayout
from trainctl.data.task_workers import run_tasks
from trainctl.data.tasks import OnPreparation, Task
from trainctl.data.tokenizer import Tokenizer, encoder_of, stores_loss_mask
from trainctl.data.user_functions import in_words, load_user_function, make_importable
from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.options.data import document_identity, spec_of
from trainctl.plans.mixture import SINGLE_SOURCE, sources_of
from trainctl.readers.documents import (
    BadText,
    Reader,
    held_out_choice,
    is_one_document,
    split_documents,
)
from trainctl.readers.files import TextFiles, digest_of, split_files
from trainctl.readers.remote import File, Notify, version_of
from trainctl.runs.records import ignore_progress

__all__ = ["Corpus", "Split", "build_corpus", "build_users_corpus"]

_MOST_REPAIRS = 5
"""Attempts to repair damaged parts before giving up: a disk that fails this often keeps
failing.
"""


@dataclass(frozen=True, kw_only=True)
class CorpusBuilder:
    """Builder of the corpus of one source.

    Any number of processes and machines tokenize the tasks of a store. One process then assembles
    the corpus. Text that is cut by `data.max_bytes`, and a single document that is split, is
    tokenized by one process instead, because its ids depend on where it is cut.
    """

    config: DataConfig
    tokenizer: Tokenizer
    run_data: DataConfig
    """The run's `data` section; `config` itself if that is the only source."""
    name: str = SINGLE_SOURCE
    progress: OnPreparation = ignore_progress
    notify: Notify = ignore_message
    """Called for each problem of the cache."""
    tokenizer_section: TokenizerConfig | None = None
    """Section for other processes to load; None does all work in this process."""
    executor: Executor = LOCAL

    def build(self) -> Corpus:
        """Return the corpus, from the cache if the same files were tokenized before.

        Raises:
            TrainctlError: No file matches, one cannot be read or has bad text; nothing is left to
                train on; or the cache cannot be written (exit code 4).
        """
        spec = spec_of(self.config)
        if spec.is_prepared:
            corpus: Corpus = function_of("data", self.config.kind)(
                self.config, self.tokenizer, self.notify
            )
            return corpus
        if spec.is_tokenized:
            count = f"{len(self._all_files):,} file" + ("s" if len(self._all_files) > 1 else "")
            self.notify(f"nothing to tokenize: the ids of {count} are used where they are")
            return self._load_or_write(self._write_in_place)
        if not can_tokenize_in_parts(self.config):
            return self._load_or_write(self._write_in_one_process)
        found, problem = read_corpus(self.folder)
        if found is not None:
            return found
        if not problem:
            self._run_tasks(*self._store_and_tasks)  # without the lock: other processes can help
        return self._load_or_write(self._write_from_store)

    def cached(self) -> Corpus | None:
        """Return the corpus if the same files were tokenized before, else None.

        No text is read. The index of existing token files is written if it is missing.

        Raises:
            TrainctlError: No file matches; or, for existing token files, as `build`.
        """
        if spec_of(self.config).is_prepared or spec_of(self.config).is_tokenized:
            return self.build()
        file = self.folder / "corpus.json"
        return replace(Corpus.load(file), folder=str(self.folder)) if file.is_file() else None

    def tokenize_share(self, number: int, count: int) -> int:
        """Tokenize share `number` (from 1) of `count` without assembling the corpus.

        Returns:
            Number of tasks of the corpus that other jobs still have to do.

        Raises:
            TrainctlError: As `build`; or the text cannot be divided into tasks.
        """
        if spec_of(self.config).is_tokenized or spec_of(self.config).is_prepared:
            return 0
        if not can_tokenize_in_parts(self.config):
            raise TrainctlError(
                "this text is cut somewhere (data.max_bytes, or a single document): it is one task",
                hint="leave out --task",
            )
        store, tasks = self._store_and_tasks
        self._run_tasks(store, tasks[number - 1 :: count])
        return sum(not store.is_done(task) for task in tasks)

    @cached_property
    def files(self) -> TextFiles:
        """Training and held-out files of the source."""
        return split_files(self.config)

    @cached_property
    def folder(self) -> Path:
        """Folder of the corpus in the cache."""
        selection = []
        if self.run_data.has_quality_rules:
            sources = sources_of(self.run_data).items()
            every = {name: (section, split_files(section)) for name, section in sources}
            selection = [self.name, selection_digest(self.run_data, every)]
        key = digest_of("\n".join([str(FORMAT), *self._key_parts, *selection]))[:24]
        return cache_folder() / f"corpus-{key}"

    @cached_property
    def _key_parts(self) -> list[str]:
        """Everything that the tokens depend on."""
        config, files = self.config, self.files
        parts = [encoder_of(config, self.tokenizer).fingerprint, document_identity(config)]
        parts.append(str(config.max_bytes))
        for split, its_files in (("train", files.train), ("held_out", files.held_out)):
            parts += [split, *map(version_of, its_files)]
        return [*parts, config.on_bad_text.value, held_out_choice(config, files)]

    @property
    def _all_files(self) -> list[File]:
        return files_in_order(self.files.train, self.files.held_out)

    @cached_property
    def _store_and_tasks(self) -> tuple[TokenStore, list[Task]]:
        encoder = encoder_of(self.config, self.tokenizer)
        store = TokenStore.of(cache_folder(), self.config, encoder)
        return store, store.tasks(self._all_files)

    def _run_tasks(self, store: TokenStore, tasks: Sequence[Task]) -> None:
        run_tasks(
            store,
            tasks,
            executor=self.executor,
            section=self.tokenizer_section,
            show=self.progress,
        )

    def _load_or_write(self, write: Callable[[], None]) -> Corpus:
        return _load_or_write(self.folder, write, self.notify)

    def _write_in_place(self) -> None:
        """Write only the index of existing token files."""
        chunks = chunks_in_place(self.config, self.tokenizer, self.files)
        write_corpus(self.folder, self.tokenizer, chunks, BadText, self._all_files)

    def _write_in_one_process(self) -> None:
        reader = Reader(self.config)
        texts = (
            (split, each.text) for split, each in split_documents(self.config, self.files, reader)
        )
        chunks = tokenize_chunks(texts, encoder_of(self.config, self.tokenizer), self.progress)
        write_corpus(self.folder, self.tokenizer, chunks, lambda: reader.bad)

    def _write_from_store(self) -> None:
        """Assemble the corpus from the store, and repair damaged parts of the store first."""
        store, tasks = self._store_and_tasks
        for _ in range(_MOST_REPAIRS):
            self._run_tasks(store, tasks)
            try:
                kept = self._kept_documents() if self.run_data.has_quality_rules else None
                keep = kept.keep[self.name] if kept is not None else None
                targets = TargetLayout.joined(
                    [store.part(task).targets for task in tasks],
                    getattr(self.config, "classes", ()),
                )
                return write_corpus(
                    self.folder,
                    self.tokenizer,
                    store_chunks(store, tasks, self.files, self.config, keep, targets),
                    lambda: bad_text(store, tasks, self.files),
                    self._all_files,
                    {DROPPED: kept.dropped[self.name]} if kept is not None else None,
                    is_marked=stores_loss_mask(self.config),
                    targets=targets,
                    keeps_records=isinstance(store.tokenizer, KeptRecords),
                )
            except DamagedPart as damage:
                self.notify(f"{damage.folder} is damaged ({damage.why}): tokenizing its text again")
                store.discard(damage.folder)
        raise MachineError(
            f"what is written to {store.folder} is read as something else, again and again",
            hint="name a folder on another disk in TRAINCTL_CACHE_DIR",
        )

    def _kept_documents(self) -> KeptDocuments:
        """Apply the quality rules to all sources of the run, which are tokenized first."""
        sources = []
        for name, section in sources_of(self.run_data).items():
            if can_tokenize_in_parts(section):
                builder = replace(self, config=section, name=name)
                store, tasks = builder._store_and_tasks
                self._run_tasks(store, tasks)
                sources.append(TokenizedSource(name, section, store, tasks, builder.files))
        columns = columns_folder(cache_folder(), self.run_data, sources)
        executor = INLINE if self.tokenizer_section is None else self.executor
        with lock_folder(columns, self.notify), convert_write_errors(columns):
            return select_training_documents(
                self.run_data, sources, columns, executor=executor, show=self.progress
            )


def build_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    run_data: DataConfig | None = None,
    workers: int | None = None,
    **rest: Any,
) -> Corpus:
    """Return the corpus of a section, prepared on this machine.

    `workers` are the processes, as in `LocalExecutor`; `rest` are further fields of
    `CorpusBuilder`.
    """
    rest = {"run_data": run_data or config, "executor": LocalExecutor(workers), **rest}
    return CorpusBuilder(config=config, tokenizer=tokenizer, **rest).build()


def can_tokenize_in_parts(config: DataConfig) -> bool:
    """Return True if the ids of each document do not depend on its position in the corpus."""
    if spec_of(config).is_tokenized or spec_of(config).is_prepared:
        return False
    is_cut = config.max_bytes is not None or is_one_document(config, split_files(config))
    if is_cut and stores_loss_mask(config):
        raise TrainctlError(
            "a single conversation cannot be divided, nor one be cut by data.max_bytes",
            hint="data.held_out_fraction=0, or more conversations; and leave data.max_bytes out",
        )
    return not is_cut


def build_users_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    progress: OnPreparation = ignore_progress,
    notify: Notify = ignore_message,
) -> Corpus:
    """Return the corpus of a config with `data.factory`, in a folder of the run.

    A function may return other texts when it is called again, so its first result is kept with the
    run, and a resume trains on that. The function is called again only if that result is damaged.

    Args:
        config: Names the function. It is called as ``function(config, split)``, with ``train`` and
            ``held_out``, and returns the documents of that split as an iterable of texts.

    Raises:
        TrainctlError: The function cannot be imported, fails, or gives anything but texts; or, by
            `data.on_bad_text`, a text that cannot be encoded.
    """

    def write() -> None:
        reader = Reader(config)
        texts = (
            (split, text)
            for split in ("held_out", "train")
            for text in _users_texts(config, split, reader)
        )
        encoder = encoder_of(config, tokenizer)
        write_corpus(
            folder, tokenizer, tokenize_chunks(texts, encoder, progress), lambda: reader.bad
        )

    return _load_or_write(folder, write, notify)


def _load_or_write(folder: Path, write: Callable[[], None], notify: Notify) -> Corpus:
    """Return the corpus of a folder, and write it first if it is missing or damaged."""
    corpus, _ = read_corpus(folder)
    if corpus is None:
        with lock_folder(folder, notify):  # another launch may be writing it
            corpus, problem = read_corpus(folder)
            if corpus is None:
                if problem:
                    notify(f"{folder} is damaged ({problem}): tokenizing the text again")
                write()
                corpus = Corpus.load(folder / "corpus.json")
    return corpus


def _users_texts(config: DataConfig, split: str, reader: Reader) -> Iterator[str]:
    assert config.factory is not None
    named = f"data.factory={config.factory}"
    make_importable(Path.cwd())
    function = load_user_function("data.factory", config.factory)
    try:
        for number, text in enumerate(function(config, split)):
            if not isinstance(text, str):
                raise TypeError(f"expected texts, got {type(text).__name__}")
            clean = reader.clean(text, f"{named}, document {number:,} of {split}")
            if clean is not None:
                yield clean
    except TrainctlError:
        raise
    except Exception as error:
        raise TrainctlError(
            f"{named} failed on the {split} split: {in_words(error)}",
            hint="it is called as function(config, split) and gives the split's texts",
            exit_code=ExitCode.training_failed,
        ) from error
