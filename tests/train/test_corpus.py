"""The corpus: which files, how they are split, what is written, and what is refused."""

import errno
import json
import math
import os
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from trainctl.config.registry import new_section
from trainctl.config.schema import DataConfig, HeldOutBy, TokenizerConfig
from trainctl.data.cache_files import cache_folder, lock_folder
from trainctl.data.corpus import Corpus, build_corpus
from trainctl.data.corpus_record import read_corpus
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.data import document_identity
from trainctl.readers.files import split_files


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"document {index}\n" * 5)
    (folder / "deep" / "lines.jsonl").write_text(
        json.dumps({"text": "first"}) + "\n\n" + json.dumps({"text": "second", "other": 1}) + "\n"
    )
    return folder


def files_config(texts, **fields):
    return new_section("data", "files", paths=[str(texts / "**" / "*.*")], **fields)


def test_text_sources_keep_the_identity_of_old_caches():
    assert document_identity(DataConfig()) == "text"
    assert document_identity(new_section("data", "files", text_key="body")) == "body"


def test_the_standard_library_is_there_and_its_tests_are_not():
    files = split_files(DataConfig())
    assert len(files.train) > 100 and files.by_document
    assert all(not {"site-packages", "test"} & {*file.parts} for file in files.train)


def test_a_file_is_on_the_same_side_wherever_the_folder_is_and_whatever_is_added(texts, tmp_path):
    keys = {"held_out_fraction": 0.2, "held_out_by": HeldOutBy.file}
    held_out = split_files(files_config(texts, **keys)).held_out
    assert len(held_out) == round(21 * 0.2)
    moved = tmp_path / "moved"
    texts.rename(moved)
    names = {file.name for file in split_files(files_config(moved, **keys)).held_out}
    assert names == {file.name for file in held_out}


def test_tokens_are_the_documents_in_order_each_closed(texts):
    corpus = build_corpus(files_config(texts, held_out_fraction=0.0), ByteTokenizer())
    expected = b""
    ids: list[int] = []
    for file in sorted(texts.rglob("*.*")):
        documents = ["first", "second"] if file.suffix == ".jsonl" else [file.read_text()]
        for text in documents:
            ids += [*text.encode(), 256]
            expected += text.encode()
    assert corpus.tokens(corpus.train).tolist() == ids
    assert corpus.train.documents == 22 and corpus.held_out.tokens == 0
    counts = Counter(ids)
    entropy = -sum(c / len(ids) * math.log(c / len(ids)) for c in counts.values())
    assert corpus.unigram_entropy == pytest.approx(entropy, rel=1e-12)


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("max_bytes", [None, 10**6])
def test_a_separator_closes_each_document(texts, monkeypatch, workers, max_bytes):
    monkeypatch.setattr("trainctl.data.tasks.TASK_BYTES", 400)
    plain, separated = (
        build_corpus(
            files_config(texts, held_out_fraction=0.0, max_bytes=max_bytes, **fields),
            ByteTokenizer(),
            tokenizer_section=TokenizerConfig(),
            workers=workers,
        )
        for fields in ({}, {"separator": "\n--\n"})
    )
    ids = plain.tokens(plain.train).tolist()
    closed = [each for one in ids for each in ([*b"\n--\n", one] if one == 256 else [one])]
    assert separated.tokens(separated.train).tolist() == closed
    ends = [place + 1 for place, one in enumerate(closed) if one == 256]
    assert separated.ends(separated.train).tolist() == ends
    assert separated.folder != plain.folder


def test_the_cache_is_used_until_a_file_changes(texts):
    config = files_config(texts)
    calls = []
    first = build_corpus(config, ByteTokenizer(), progress=calls.append)
    assert len(calls) == 22
    assert build_corpus(config, ByteTokenizer(), progress=calls.append) == first
    assert len(calls) == 22
    (texts / "3.txt").write_text("changed")
    second = build_corpus(config, ByteTokenizer(), progress=calls.append)
    assert len(calls) == 44 and second.digest != first.digest


def test_how_much_is_tokenized_together_changes_nothing(texts, monkeypatch):
    config = files_config(texts)
    together = build_corpus(config, ByteTokenizer())
    shutil.rmtree(cache_folder())
    monkeypatch.setattr("trainctl.data.tokenizer.BATCH_CHARACTERS", 7)
    assert build_corpus(config, ByteTokenizer()) == together


def test_max_bytes_cuts_the_text(texts):
    corpus = build_corpus(files_config(texts, max_bytes=100, held_out_fraction=0), ByteTokenizer())
    ids = corpus.tokens(corpus.train)
    assert (np.asarray(ids) != 256).sum() == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x"}', "no text under 'text'"),
        ("{broken", r":1: not JSON: .* at column 2"),
        ("[1]", "a JSON array"),
    ],
)
def test_a_broken_jsonl_names_the_file(texts, content, message):
    (texts / "bad.jsonl").write_text(content + "\n")
    with pytest.raises(TrainctlError, match=message) as caught:
        build_corpus(files_config(texts), ByteTokenizer())
    assert "bad.jsonl" in caught.value.message


def test_a_glob_without_files_says_which(tmp_path):
    config = new_section("data", "files", paths=[str(tmp_path / "none" / "*.txt")])
    with pytest.raises(TrainctlError, match=r"data\.paths: no file matches"):
        build_corpus(config, ByteTokenizer())


def built(texts, **fields):
    """Build the corpus; return it with the messages about the cache."""
    told: list[str] = []
    return build_corpus(files_config(texts, **fields), ByteTokenizer(), notify=told.append), told


def test_the_digest_tells_training_text_from_held_out_text(texts):
    """Both corpora have the same tokens in the same order, and different held-out files."""
    names = sorted(texts.glob("*.txt"))
    assert len(names) == 20
    fields = [
        {"paths": [str(name) for name in names], "held_out_paths": [str(name) for name in held]}
        for held in (names[:1], names[:2])
    ]
    corpora = [
        build_corpus(new_section("data", "files", **each), ByteTokenizer()) for each in fields
    ]
    raw = [
        b"".join((Path(c.folder) / s.file).read_bytes() for s in (c.held_out, c.train))
        for c in corpora
    ]
    assert raw[0] == raw[1]
    assert corpora[0].digest != corpora[1].digest


def scramble(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = data[: -(len(data) // 2)][::-1][: len(data) - len(data) // 2]
    path.write_bytes(data)


def flip(path):
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "file", ["train.bin", "held_out.bin", "train.ends", "train.origin", "corpus.json"]
)
@pytest.mark.parametrize(
    "damage",
    [scramble, flip, lambda path: os.truncate(path, 40), lambda path: path.unlink()],
    ids=["scrambled", "one bit", "truncated", "gone"],
)
def test_a_damaged_cache_is_made_again(texts, file, damage):
    corpus, told = built(texts)
    assert told == []
    folder = Path(corpus.folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / file)
    again, told = built(texts)
    assert again == corpus and again.problem() == ""
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.suffix for path in folder.parent.iterdir()} == {"", ".lock"}
    if (file, damage.__name__) != ("corpus.json", "<lambda>") or told:
        assert "damaged" in told[0] and file in told[0]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc tells the advice")
@pytest.mark.parametrize("in_order", [True, False])
def test_the_kernel_does_not_read_ahead_of_samples_here_and_there(texts, in_order):
    corpus, _ = built(texts)
    tokens = corpus.tokens(corpus.train, in_order=in_order)
    assert not tokens.flags.writeable
    file = str(Path(corpus.folder) / "train.bin")
    _, _, found = Path("/proc/self/smaps").read_text().partition(file)
    flags = next(line for line in found.splitlines() if line.startswith("VmFlags:")).split()
    assert ("rr" in flags) is not in_order  # "random read advise", Documentation/filesystems/proc


def test_a_truncated_file_is_an_error_where_it_is_mapped(texts):
    corpus, _ = built(texts)
    os.truncate(Path(corpus.folder) / "train.bin", 100)
    with pytest.raises(TrainctlError, match=r"damaged: train\.bin has 100 bytes, not") as caught:
        corpus.tokens(corpus.train)
    assert caught.value.exit_code == ExitCode.run_state


def test_everything_is_synced_before_the_folder_has_its_name(texts, monkeypatch):
    synced, renamed = set(), []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        fsync(descriptor)
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def note_rename(path, target):
        renamed.append(({Path(name).name.split(".")[-1] for name in synced}, set(synced)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    folder = Path(built(texts)[0].folder)
    (_, of_part), (_, names) = renamed
    assert {Path(name).name for name in of_part} >= {"ids.bin", "ends.bin", "origin.bin"}
    temporary = folder.with_suffix(".tmp")
    split_documents = [
        f"{side}.{what}" for side in ("train", "held_out") for what in ("bin", "ends")
    ]
    assert {str(temporary), *(str(temporary / name) for name in split_documents)} <= names
    assert str(folder.parent) in synced


PART = ("ids", "ends", "origin", "hash")


class Disk:
    """Full after so many bytes of tokens."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with suppress(OSError):
            self.stream.close()

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.stream.write(data)


@pytest.mark.parametrize("file", ["ids.bin", "train.bin"])
def test_a_full_disk_is_the_machines_fault_and_leaves_nothing(texts, monkeypatch, file):
    plain = Path.open

    def limited(path, mode="r", **more):
        stream = plain(path, mode, **more)
        return Disk(stream, 150) if path.name == file and mode == "wb" else stream

    monkeypatch.setattr(Path, "open", limited)
    with pytest.raises(TrainctlError, match=r"corpus.*No space left on device") as caught:
        built(texts)
    assert caught.value.exit_code == ExitCode.environment
    assert "TRAINCTL_CACHE_DIR" in caught.value.hint
    left = {path.name for path in cache_folder().rglob("*.bin")}
    assert left == (set() if file == "ids.bin" else {f"{name}.bin" for name in PART})
    assert not list(cache_folder().rglob("*.tmp"))


def test_a_cache_that_cannot_be_made_is_the_machines_fault(texts, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(texts / "0.txt"))
    with pytest.raises(TrainctlError, match="cannot write the tokenized corpus") as caught:
        built(texts)
    assert caught.value.exit_code == ExitCode.environment


def test_a_waiting_process_reports_which_process_it_waits_for(texts):
    folder = cache_folder() / "corpus-x"
    told: list[str] = []

    def wait():
        with lock_folder(folder, told.append):
            told.append("has it")

    with lock_folder(folder, told.append):
        waiting = threading.Thread(target=wait)
        waiting.start()
        while not told:
            time.sleep(0.01)
        assert f"waiting for process {os.getpid()} on " in told[0] and str(folder) in told[0]
        assert folder.with_suffix(".lock").stat().st_mode & 0o077 == 0
        assert told[1:] == []
    waiting.join(timeout=10)
    assert told[1:] == ["has it"]


def test_a_bad_text_leaves_nothing_in_the_cache(texts):
    (texts / "zz.jsonl").write_text("{broken\n")
    with pytest.raises(TrainctlError, match=r"zz\.jsonl:1"):
        built(texts)
    assert files_left() == {"store.json"}


def files_left():
    """Names of all files of the cache."""
    return {path.name for path in cache_folder().rglob("*") if not path.is_dir()}


def test_a_record_of_another_version_is_not_read(texts, tmp_path):
    corpus, _ = built(texts)
    record = json.loads((Path(corpus.folder) / "corpus.json").read_text())
    without_ends = {**record, "train": {**record["train"], "ends": ""}}
    for changed, why in (({**record, "format": 1}, "format"), (without_ends, "documents end")):
        (tmp_path / "corpus.json").write_text(json.dumps(changed))
        with pytest.raises(TrainctlError, match=why):
            Corpus.load(tmp_path / "corpus.json")
        assert read_corpus(tmp_path)[0] is None
