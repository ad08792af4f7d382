"""The tokenized corpus: built once before the ranks start, then memory-mapped. No torch.

A corpus is a folder of the cache with `train.bin` and `held_out.bin` (token ids, little endian, all
documents one after the other) and `corpus.json`. Which file is held out is a function of its name
alone, so that adding a file moves no other.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import DataConfig, DataKind
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import write_json
from trainctl.train.tokenizer import Tokenizer
from trainctl.train.user_code import in_words, load

CACHE_VARIABLE = "TRAINCTL_CACHE_DIR"
_FORMAT = 1
# Folders of the standard library that are not its own source: tests, installed packages, caches.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Split:
    """One side of the corpus.

    Attributes:
        file: Name of the token file in the corpus folder.
        tokens: Its length in tokens.
        documents: Documents in it, each followed by the end-of-document id if there is one.
    """

    file: str
    tokens: int
    documents: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """What `corpus.json` says.

    Attributes:
        folder: Folder of the token files.
        dtype: numpy name of the ids' type.
        end_of_document: Id that closes a document, or None.
        train: The text to train on.
        held_out: The text of the held-out files; 0 tokens if nothing could be held out.
        unigram_entropy: Entropy of the train split's tokens in nats: the loss of a model that knows
            how often each token occurs and nothing else.
        digest: SHA-256 over both token files: the same on resume, or it is another corpus.
    """

    folder: str
    dtype: str
    end_of_document: int | None
    train: Split
    held_out: Split
    unigram_entropy: float
    digest: str

    def tokens(self, split: Split) -> npt.NDArray[np.integer]:
        """The split's ids, shape (tokens,), memory-mapped."""
        if split.tokens == 0:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(Path(self.folder) / split.file, dtype=self.dtype, mode="r")

    @classmethod
    def load(cls, path: Path) -> Corpus:
        data = json.loads(path.read_text())
        return cls(
            **{**data, "train": Split(**data["train"]), "held_out": Split(**data["held_out"])}
        )


def cache_folder() -> Path:
    """Where tokenized corpora are kept: TRAINCTL_CACHE_DIR, or the user's cache."""
    explicit = os.environ.get(CACHE_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(explicit) if explicit else base / "trainctl"


def build_corpus(
    config: DataConfig, tokenizer: Tokenizer, progress: Callable[[int], None] | None = None
) -> Corpus:
    """The corpus of a config, from the cache if the same files were tokenized before.

    Args:
        config: Which files, and which of them are held out.
        tokenizer: Its fingerprint is part of the cache's key.
        progress: Called with the number of documents done, as tokenizing goes on.

    Raises:
        TrainctlError: No file matches, or one cannot be read.
    """
    train, held_out = split_files(config)
    folder = _folder(config, tokenizer, train, held_out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another launch may be tokenizing the same
        if not (folder / "corpus.json").is_file():
            texts = {"held_out": _texts(held_out, config), "train": _texts(train, config)}
            _write(folder, tokenizer, texts, progress)
    return Corpus.load(folder / "corpus.json")


def cached_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus | None:
    """The corpus of a config, if the same files were tokenized before; nothing is read of them.

    Raises:
        TrainctlError: No file matches.
    """
    found = _folder(config, tokenizer, *split_files(config)) / "corpus.json"
    return Corpus.load(found) if found.is_file() else None


def _folder(
    config: DataConfig, tokenizer: Tokenizer, train: list[Path], held_out: list[Path]
) -> Path:
    """Where the cache has the corpus of these files."""
    return cache_folder() / f"corpus-{_key(config, tokenizer, train, held_out)}"


def build_users_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """The corpus of a config with `data.factory`, in a folder of the run's.

    Nothing tells whether a function would give the same again, so what it gave once is kept with
    the run: a resume trains on that.

    Args:
        config: Names the function. It is called as ``function(config, split)``, with ``train`` and
            ``held_out``, and gives the documents of that split as an iterable of texts.
        tokenizer: Of the run.
        folder: Made if it is not there yet.
        progress: As for `build_corpus`.

    Raises:
        TrainctlError: The function cannot be imported, fails, or gives anything but texts.
    """
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of another node
        if not (folder / "corpus.json").is_file():
            texts = {split: _users_texts(config, split) for split in ("held_out", "train")}
            _write(folder, tokenizer, texts, progress)
    corpus = Corpus.load(folder / "corpus.json")
    return replace(corpus, folder=str(folder))  # the run's directory may have been moved


def _users_texts(config: DataConfig, split: str) -> Iterator[str]:
    assert config.factory is not None
    named = f"data.factory={config.factory}"
    function = load("data.factory", config.factory)
    try:
        for text in function(config, split):
            if not isinstance(text, str):
                raise TypeError(f"expected texts, got {type(text).__name__}")
            yield text
    except Exception as error:
        raise TrainctlError(
            f"{named} failed on the {split} split: {in_words(error)}",
            hint="it is called as function(config, split) and gives the split's texts",
            exit_code=ExitCode.training_failed,
        ) from error


def split_files(config: DataConfig) -> tuple[list[Path], list[Path]]:
    """The files to train on and the held-out files, each sorted by path."""
    files = _stdlib_files() if config.kind is DataKind.stdlib else _glob(config.paths, "data.paths")
    if config.held_out_paths:
        held_out = _glob(config.held_out_paths, "data.held_out_paths")
        return [file for file in files if file not in set(held_out)], held_out
    root = Path(os.path.commonpath([file.parent for file in files]))
    by_hash = sorted(files, key=lambda file: _hash(str(file.relative_to(root))))
    count = min(round(len(files) * config.held_out_fraction), len(files) - 1)
    if config.held_out_fraction > 0 and len(files) > 1:
        count = max(count, 1)
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = (
        file
        for file in root.rglob("*.py")
        if not _STDLIB_SKIPPED & set(file.parts[len(root.parts) :])
    )
    return sorted(found)


def _glob(patterns: list[str], key: str) -> list[Path]:
    files: set[Path] = set()
    for pattern in patterns:
        matches = glob.iglob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207
        found = {Path(match).resolve() for match in matches if Path(match).is_file()}
        if not found:
            raise TrainctlError(
                f"{key}: no file matches {pattern!r}",
                hint="globs are relative to the folder of the launch; ** crosses folders",
            )
        files |= found
    if not files:
        raise TrainctlError(f"{key} is empty", hint=f"{key}=['corpus/**/*.txt']")
    return sorted(files)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()


def _key(config: DataConfig, tokenizer: Tokenizer, train: list[Path], held_out: list[Path]) -> str:
    parts = [str(_FORMAT), tokenizer.fingerprint, config.text_key, str(config.max_bytes)]
    for name, files in (("train", train), ("held_out", held_out)):
        parts.append(name)
        for file in files:
            status = file.stat()
            parts.append(f"{file}\0{status.st_size}\0{status.st_mtime_ns}")
    return _hash("\n".join(parts))[:24]


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    texts: dict[str, Iterator[str]],
    progress: Callable[[int], None] | None,
) -> None:
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    digest = hashlib.sha256()
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    splits: dict[str, Split] = {}
    done = 0
    for name, documents_of_split in texts.items():
        tokens = documents = 0
        with (temporary / f"{name}.bin").open("wb") as out:
            for text in documents_of_split:
                ids = tokenizer.encode(text)
                if tokenizer.end_of_document is not None:
                    ids = np.append(ids, tokenizer.end_of_document)
                raw = ids.astype(dtype).tobytes()
                out.write(raw)
                digest.update(raw)
                if name == "train":
                    counts += np.bincount(ids, minlength=len(counts))
                tokens, documents, done = tokens + len(ids), documents + 1, done + 1
                if progress is not None:
                    progress(done)
        splits[name] = Split(f"{name}.bin", tokens, documents)
    shares = counts[counts > 0] / max(1, counts.sum())
    corpus = Corpus(
        folder=str(folder),
        dtype=dtype,
        end_of_document=tokenizer.end_of_document,
        train=splits["train"],
        held_out=splits["held_out"],
        unigram_entropy=float(-(shares * np.log(shares)).sum()),
        digest=digest.hexdigest(),
    )
    write_json(temporary / "corpus.json", asdict(corpus))
    temporary.rename(folder)


def _texts(files: list[Path], config: DataConfig) -> Iterator[str]:
    """The documents of the files in order, up to `data.max_bytes`."""
    room = config.max_bytes
    for file in files:
        for text in _documents(file, config.text_key):
            if room is None:
                yield text
                continue
            raw = text.encode("utf-8", errors="surrogateescape")[:room]
            room -= len(raw)
            yield raw.decode("utf-8", errors="ignore")
            if room == 0:
                return


def _documents(file: Path, text_key: str) -> Iterator[str]:
    """The documents of a file: each line's text of JSONL, else the whole file."""
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8", errors="surrogateescape")
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                text = record.get(text_key) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    raise TrainctlError(
                        f"{file}:{number}: no text under {text_key!r}",
                        hint="set data.text_key to the key of the text",
                    )
                yield text
    except OSError as error:
        raise TrainctlError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise TrainctlError(f"{file}: not JSONL: {error}") from None
