"""The tokenized corpus: built once before the ranks start, then memory-mapped. No torch.

A corpus is a folder of the cache with `train.bin` and `held_out.bin` (token ids, little endian,
documents concatenated), `train.ends` and `held_out.ends` (where each document ends) and
`corpus.json` (sizes and checksums). The checksums are verified before every start. A damaged corpus
is assembled again from the store of its parts (`trainctl.data`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainctl.config.quality import has_quality_rules
from trainctl.config.registry import function_of
from trainctl.config.schema import DataConfig, Packing, TokenizerConfig
from trainctl.config.text.documents import BadText, Reader, is_one_document, sides
from trainctl.config.text.files import TextFiles, digest_of, split_files
from trainctl.config.text.remote import version_of
from trainctl.data.cache_files import Notify, cache_folder, ignore_message, locked
from trainctl.data.corpus_record import FORMAT, Corpus, Split, read_corpus
from trainctl.data.corpus_writer import (
    bad_text,
    migrate,
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
from trainctl.data.pretokenized_corpus import chunks_in_place
from trainctl.data.progress import Progress, ignore_progress
from trainctl.data.store import TokenStore, files_in_order
from trainctl.data.store_part import DamagedPart
from trainctl.data.task_workers import run_tasks
from trainctl.data.tasks import Task
from trainctl.data.tokenizer import Tokenizer, encoder_of, stores_loss_mask
from trainctl.data.user_functions import in_words, load, make_importable
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.data import identity_of, spec_of
from trainctl.plan.mixture import SINGLE_SOURCE, sources_of

__all__ = ["Corpus", "Split", "build_corpus", "build_users_corpus"]

_MOST_REPAIRS = 5
"""Attempts to repair damaged parts before giving up: a disk that fails this often keeps
failing.
"""


def build_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress = ignore_progress,
    notify: Notify = ignore_message,
    *,
    section: TokenizerConfig | None = None,
    workers: int | None = None,
    whole: DataConfig | None = None,
    name: str = SINGLE_SOURCE,
) -> Corpus:
    """Return the corpus of a config, from the cache if the same files were tokenized before.

    Any number of processes and machines tokenize the tasks of a store. One process then assembles
    the corpus. Text that is cut by `data.max_bytes`, and a single document that is divided, is
    tokenized by one process instead, because its ids depend on where it is cut.

    Args:
        progress: Called with the state of tokenizing as it goes on.
        tell: Called with a sentence about each problem of the cache.
        section: Tokenizer section for worker processes to load; None does all work in this process.
        workers: Number of processes; None uses one per core.
        whole: The run's `data` section, if `config` is one of its sources.

    Raises:
        TrainctlError: No file matches, one cannot be read or has bad text; nothing is left to train
            on; or the cache cannot be written (exit code 4).
    """
    if spec_of(config).is_prepared:
        return _prepared(config, tokenizer, notify)
    whole = whole or config
    folder, earlier, files = _cached_at(config, tokenizer, whole, name)
    if spec_of(config).is_tokenized:
        return _in_place(config, tokenizer, folder, files, notify)

    def tell_of_format_1() -> None:
        if (earlier / "corpus.json").is_file():
            notify(
                f"{earlier} has this text in an older format: tokenizing it again; nothing of "
                "this version needs the folder"
            )

    needed = _needs_ends(config, whole)
    if not can_tokenize_in_parts(config):

        def write() -> None:
            tell_of_format_1()
            reader = Reader(config)
            texts = ((side, document.text) for side, document in sides(config, files, reader))
            encoder = encoder_of(config, tokenizer)
            write_corpus(
                folder, tokenizer, tokenize_chunks(texts, encoder, progress), lambda: reader.bad
            )

        return _from_cache(folder, write, notify, needed)

    def do(store: TokenStore, tasks: Sequence[Task]) -> None:
        run_tasks(store, tasks, section=section, workers=workers, show=progress)

    corpus, problem = _read(folder, needed)
    if corpus is not None:
        return corpus
    store, tasks = _store_of(config, tokenizer, files)
    if not problem:
        do(store, tasks)  # without the lock, so that other processes can help

    def choose_of_run() -> KeptDocuments:
        sources = []
        for source, its in sources_of(whole).items():
            if can_tokenize_in_parts(its):
                its_store, its_tasks = _store_of(its, tokenizer, split_files(its))
                do(its_store, its_tasks)
                sources.append(TokenizedSource(source, its, its_store, its_tasks, split_files(its)))
        columns = columns_folder(cache_folder(), whole, sources)
        with locked(columns, notify):
            return select_training_documents(
                whole, sources, columns, workers=1 if section is None else workers, show=progress
            )

    def put_together() -> None:
        tell_of_format_1()
        for _ in range(_MOST_REPAIRS):
            do(store, tasks)
            try:
                chosen = choose_of_run() if has_quality_rules(whole) else None
                keep = chosen.keep[name] if chosen is not None else None
                found = store_chunks(store, tasks, files, config.held_out_fraction, keep)
                return write_corpus(
                    folder,
                    tokenizer,
                    found,
                    lambda: bad_text(store, tasks, files),
                    files_in_order(files.train, files.held_out),
                    {DROPPED: chosen.dropped[name]} if chosen is not None else None,
                    is_marked=stores_loss_mask(config),
                )
            except DamagedPart as damage:
                notify(f"{damage.folder} is damaged ({damage.why}): tokenizing its text again")
                store.discard(damage.folder)
        raise TrainctlError(
            f"what is written to {store.folder} is read as something else, again and again",
            hint="name a folder on another disk in TRAINCTL_CACHE_DIR",
            exit_code=ExitCode.environment,
        )

    return _from_cache(folder, put_together, notify, needed)


def _prepared(config: DataConfig, tokenizer: Tokenizer, notify: Notify) -> Corpus:
    """Return a corpus that was tokenized and stored elsewhere."""
    corpus: Corpus = function_of("data", config.kind)(config, tokenizer, notify)
    return corpus


def _in_place(
    config: DataConfig, tokenizer: Tokenizer, folder: Path, files: TextFiles, notify: Notify
) -> Corpus:
    """Return a corpus of existing token files: only an index of them is written."""
    every = files_in_order(files.train, files.held_out)

    def write() -> None:
        found = chunks_in_place(config, tokenizer, files)
        write_corpus(folder, tokenizer, found, BadText, every)

    count = f"{len(every):,} file" + ("s" if len(every) > 1 else "")
    notify(f"nothing to tokenize: the ids of {count} are used where they are")
    return _from_cache(folder, write, notify)


def tokenize_share(
    config: DataConfig,
    tokenizer: Tokenizer,
    share: tuple[int, int],
    progress: Progress = ignore_progress,
    *,
    section: TokenizerConfig | None = None,
    workers: int | None = None,
) -> int:
    """Tokenize one share of a corpus without assembling it: one job of a job array.

    `share` is the share's number, from 1, and the number of shares. The other arguments are as in
    `build_corpus`.

    Returns:
        Number of tasks of the corpus that other jobs still have to do.

    Raises:
        TrainctlError: As `build_corpus`; or the text cannot be divided into tasks.
    """
    if spec_of(config).is_tokenized or spec_of(config).is_prepared:
        return 0
    if not can_tokenize_in_parts(config):
        raise TrainctlError(
            "this text is cut somewhere (data.max_bytes, or a single document): it is one task",
            hint="leave out --task",
        )
    files = split_files(config)
    store, tasks = _store_of(config, tokenizer, files)
    number, count = share
    run_tasks(store, tasks[number - 1 :: count], section=section, workers=workers, show=progress)
    return sum(not store.is_done(task) for task in tasks)


def can_tokenize_in_parts(config: DataConfig) -> bool:
    """Return True if the ids of each document do not depend on its position in the corpus.

    Raises:
        TrainctlError: A file is missing or cannot be read.
    """
    if spec_of(config).is_tokenized or spec_of(config).is_prepared:
        return False
    is_cut = config.max_bytes is not None or is_one_document(config, split_files(config))
    if is_cut and stores_loss_mask(config):
        raise TrainctlError(
            "a single conversation cannot be divided, nor one be cut by data.max_bytes",
            hint="data.held_out_fraction=0, or more conversations; and leave data.max_bytes out",
        )
    return not is_cut


def _store_of(
    config: DataConfig, tokenizer: Tokenizer, files: TextFiles
) -> tuple[TokenStore, list[Task]]:
    store = TokenStore.of(cache_folder(), config, encoder_of(config, tokenizer))
    return store, store.tasks(files_in_order(files.train, files.held_out))


def cached_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    whole: DataConfig | None = None,
    name: str = SINGLE_SOURCE,
) -> Corpus | None:
    """Return the corpus of a config if the same files were tokenized before, else None.

    No text is read. The index of existing token files is written if it is missing. Arguments are as
    in `build_corpus`.

    Raises:
        TrainctlError: No file matches; or, for existing token files, as `build_corpus`.
    """
    if spec_of(config).is_prepared:
        return _prepared(config, tokenizer, ignore_message)
    folder, _, files = _cached_at(config, tokenizer, whole or config, name)
    if spec_of(config).is_tokenized:
        return _in_place(config, tokenizer, folder, files, ignore_message)
    file = folder / "corpus.json"
    corpus = Corpus.load(file) if file.is_file() else None
    is_too_old = corpus and not corpus.train.ends and _needs_ends(config, whole or config)
    return None if is_too_old else corpus


def _cached_at(
    config: DataConfig, tokenizer: Tokenizer, whole: DataConfig, name: str
) -> tuple[Path, Path, TextFiles]:
    """Return the cache folder of a config's corpus, its folder in format 1, and its text files."""
    files = split_files(config)
    parts = _parts(config, tokenizer, files)
    cache = cache_folder()
    choice = []
    if has_quality_rules(whole):
        every = {each: (its, split_files(its)) for each, its in sources_of(whole).items()}
        choice = [name, selection_digest(whole, every)]
    folder = cache / f"corpus-{_key([str(FORMAT), *parts, *choice])}"
    return folder, cache / f"corpus-{_key(_of_format_1(parts))}", files


def build_users_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    progress: Progress = ignore_progress,
    notify: Notify = ignore_message,
) -> Corpus:
    """Return the corpus of a config with `data.factory`, in a folder of the run.

    A function may return other texts when it is called again, so its first result is kept with the
    run, and a resume trains on that. The function is called again only if that result is damaged.

    Args:
        config: Names the function. It is called as ``function(config, split)``, with ``train`` and
            ``held_out``, and returns the documents of that split as an iterable of texts.
        folder: Created if it does not exist.

    Raises:
        TrainctlError: The function cannot be imported, fails, or gives anything but texts; or, by
            `data.on_bad_text`, a text that cannot be encoded.
    """

    def write() -> None:
        reader = Reader(config)
        texts = (
            (side, text)
            for side in ("held_out", "train")
            for text in _users_texts(config, side, reader)
        )
        encoder = encoder_of(config, tokenizer)
        write_corpus(
            folder, tokenizer, tokenize_chunks(texts, encoder, progress), lambda: reader.bad
        )

    with locked(folder, notify):
        migrate(folder, notify)
    return _from_cache(folder, write, notify)


def _needs_ends(config: DataConfig, whole: DataConfig) -> bool:
    """Return True if training on a source needs document ends, which older corpora lack.

    `whole` is the run's `data` section.
    """
    return whole.packing is not Packing.stream or bool(config.fim_rate)


def _read(folder: Path, needs_ends: bool) -> tuple[Corpus | None, str]:
    """Call `read_corpus`, and treat a corpus without required document ends as damaged."""
    corpus, problem = read_corpus(folder)
    if corpus is not None and needs_ends and not corpus.train.ends:
        return None, "it does not say where documents end"
    return corpus, problem


def _from_cache(
    folder: Path, write: Callable[[], None], notify: Notify, needs_ends: bool = False
) -> Corpus:
    """Return the corpus of a folder, and write it first if it is missing or damaged."""
    corpus, _ = _read(folder, needs_ends)
    if corpus is not None:
        return corpus
    with locked(folder, notify):  # another launch may be writing it
        corpus, problem = _read(folder, needs_ends)
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
    function = load("data.factory", config.factory)
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


def _parts(config: DataConfig, tokenizer: Tokenizer, files: TextFiles) -> list[str]:
    """Return everything that the tokens depend on."""
    fingerprint = encoder_of(config, tokenizer).fingerprint
    parts = [fingerprint, identity_of(config), str(config.max_bytes)]
    for name, of_side in (("train", files.train), ("held_out", files.held_out)):
        parts.append(name)
        for file in of_side:
            parts.append(version_of(file))
    divided = str(config.held_out_fraction) if files.by_document else ""
    return [*parts, config.on_bad_text.value, divided]


def _of_format_1(parts: list[str]) -> list[str]:
    """Return the parts of the cache key of format 1 for the same text."""
    return ["1", *parts[:-2]]


def _key(parts: list[str]) -> str:
    return digest_of("\n".join(parts))[:24]
