"""The store: the corpus that it gives is that of before, bit for bit, and what it takes back."""

import errno
import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_texts import CONFIGS, make_texts

from trainctl.config.registry import new_section
from trainctl.config.schema import HeldOutBy, OnBadText, RunConfig, TokenizerConfig
from trainctl.data import task_workers, tasks
from trainctl.data.cache_files import cache_folder, ignore_message, lock_folder
from trainctl.data.corpus import Corpus, CorpusBuilder, build_corpus
from trainctl.data.corpus_writer import tokenize_chunks, write_corpus
from trainctl.data.executors import LocalExecutor
from trainctl.data.store import TokenStore
from trainctl.data.task_workers import run_tasks
from trainctl.data.tasks import Claims, PreparationProgress, format_duration
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers import plain
from trainctl.readers.documents import Reader, split_documents
from trainctl.readers.files import split_files
from trainctl.train.data import PackedDataset

BEFORE = {
    "files": (
        "5dc7bfc4def3d56ce4d64f0f05bce3ca9162c702fc7dbbc8330b0e296a9e2a2e",
        29,
        2,
        2.9994026473339375,
    ),
    "mixed": (
        "6615b68de955410b08fb907288132205281650d0d26863c0df9d46619f47fe03",
        325,
        6,
        3.0211192071806714,
    ),
    "single": (
        "7905488ca90b5c346fed997c914215d11aed76db2aa76f592da419369912a2c7",
        267,
        33,
        3.0278677555847335,
    ),
    "whole": (
        "77934c35c1005a4e72c57e81d36b80602b0c985690472b63ecd9e792c0b52aac",
        1,
        1,
        2.9975145199601867,
    ),
    "named": (
        "e8753cc513ecd21bfce18d55884aa33f4c0139304426c27aceb349b36dbe67a3",
        321,
        10,
        3.024146598086308,
    ),
    "skip": (
        "8a3c9e4f1e1b3104376d6d861aadaca8b91b7b6c0f666e7d5cbe0ce9201c86c4",
        300,
        104,
        3.027733454685137,
    ),
    "skip_single": (
        "f2d705e7889c5d4f7ebb14395b009b1c9361283130361552e2d1fa14ada96d53",
        103,
        1,
        3.061294414611419,
    ),
    "cut": (
        "7cef6357c69caa41ceb2497b65e2aa7f9ad7db14df16286d87f950261f084a74",
        6,
        2,
        2.9716477178464724,
    ),
    "none": (
        "615c21730ca0a32c67b5573b161af718c77724c9b3a1c97f0c32e2f810efd743",
        331,
        0,
        3.019537547327271,
    ),
}
"""Digest, documents of both sides and unigram entropy of each configuration, as one process made
them that wrote all documents one after the other."""

SMALL = 10_000
"""Bytes of a task, so that there are many."""


@pytest.fixture
def texts(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    make_texts(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk has other things to do
    return folder


def section(name, **changes):
    keys = {**CONFIGS[name], **changes}
    for key, names in (("on_bad_text", OnBadText), ("held_out_by", HeldOutBy)):
        if key in keys:
            keys[key] = names(keys[key])
    return new_section("data", "files", **keys)


def store_of(config, tokenizer=None):
    store = TokenStore.of(cache_folder(), config, tokenizer or ByteTokenizer())
    files = split_files(config)
    return store, store.tasks(sorted({*files.train, *files.held_out}))


def without_origin(corpus):
    nothing = {"origin": "", "origin_blocks": ()}
    both = [replace(split, **nothing) for split in (corpus.train, corpus.held_out)]
    return replace(corpus, train=both[0], held_out=both[1])


@pytest.mark.parametrize("name", ["mixed", "single", "skip"])
def test_a_corpus_tells_where_its_documents_came_from(texts, monkeypatch, name):
    monkeypatch.setattr(tasks, "TASK_BYTES", SMALL)
    config = section(name)
    corpus = build_corpus(config, ByteTokenizer())
    expected: dict[str, list] = {"train": [], "held_out": []}
    for side, document in split_documents(config, split_files(config), Reader(config)):
        expected[side].append((str(document.file), document.line or 0))
    files = json.loads((Path(corpus.folder) / "files.json").read_text())
    for side, split in (("train", corpus.train), ("held_out", corpus.held_out)):
        origin = corpus.origin(split).tolist()
        assert [(files[file], line) for file, line in origin] == expected[side]


@pytest.mark.parametrize("size", [tasks.TASK_BYTES, 20_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_corpus_equals_the_recorded_one_however_it_is_divided(
    texts, monkeypatch, tmp_path, name, size
):
    """However it is divided: the files too, and what is said of bad text."""
    monkeypatch.setattr(tasks, "TASK_BYTES", size)
    config = section(name)
    corpus = build_corpus(config, ByteTokenizer())
    found = (corpus.digest, corpus.train.documents, corpus.held_out.documents)
    assert (*found, corpus.unigram_entropy) == BEFORE[name]
    reader = Reader(config)
    one_by_one = split_documents(config, split_files(config), reader)
    pairs = ((side, document.text) for side, document in one_by_one)
    write_corpus(
        tmp_path / "plain",
        ByteTokenizer(),
        tokenize_chunks(pairs, ByteTokenizer()),
        lambda: reader.bad,
    )
    plainly = Corpus.load(tmp_path / "plain" / "corpus.json")
    assert replace(plainly, folder=corpus.folder) == without_origin(corpus)
    for file in (tmp_path / "plain").glob("*.[be]*"):
        assert file.read_bytes() == (Path(corpus.folder) / file.name).read_bytes()


@pytest.mark.parametrize("size", [1, 40, 1000, 10**9])
def test_ranges_have_every_line_once(texts, size):
    file = texts / "b" / "big.jsonl"
    raw = file.read_bytes()
    found = plain.ranges(file, size)
    assert b"".join(raw[start:end] for start, end in found) == raw
    assert all(raw[end - 1 : end] == b"\n" for _, end in found)
    whole = [document.text for document in Reader(section("single")).read(file)]
    reader = Reader(section("single"))
    parts = [document.text for span in found for document in reader.read(file, span)]
    assert parts == whole
    assert plain.ranges(texts / "one.txt", size) == []


def test_a_line_without_an_end_and_a_mark_in_the_middle_of_a_file(texts):
    """A byte order mark is only removed at the beginning of a file."""
    file = texts / "b" / "end.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}')
    spans = plain.ranges(file, 5)
    assert len(spans) == 2
    reader = Reader(section("single"))
    assert [d.text for span in spans for d in reader.read(file, span)] == ["a", "b"]
    shifted = texts / "b" / "shifted.jsonl"
    shifted.write_bytes(b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n')
    messages = set()
    for span in (None, plain.ranges(shifted, 5)[1]):
        with pytest.raises(TrainctlError, match="not JSON") as caught:
            list(Reader(section("single")).read(shifted, span))
        messages.add(caught.value.message.partition(": ")[2])
    assert len(messages) == 1


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_lines_are_counted_in_the_file_and_not_in_the_range(texts, monkeypatch, policy):
    config = section("skip_single", on_bad_text=policy)
    said = []
    for size in (tasks.TASK_BYTES, 1500):
        monkeypatch.setattr(tasks, "TASK_BYTES", size)
        shutil.rmtree(cache_folder(), ignore_errors=True)
        if policy == "skip":
            said.append(build_corpus(config, ByteTokenizer()).bad_text)
            continue
        bad = texts / "b" / "bad.jsonl"
        lines = [line for line in bad.read_bytes().split(b"\n") if b"body" not in line]
        bad.write_bytes(b"\n".join(lines[20:]))
        with pytest.raises(TrainctlError) as caught:
            build_corpus(config, ByteTokenizer())
        said.append(caught.value.message)
        bad.write_bytes(b"\n".join(lines))
    assert said[0] == said[1] and said[0]


def test_what_is_tokenized_serves_other_sides_and_a_copy(texts, monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "TASK_BYTES", SMALL)
    calls = []
    build_corpus(section("mixed"), ByteTokenizer(), progress=calls.append)
    count = len(calls)
    assert count == 331
    build_corpus(section("mixed", held_out_fraction=0.4), ByteTokenizer(), progress=calls.append)
    assert len(calls) == count
    shutil.copytree(texts, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    build_corpus(section("mixed"), ByteTokenizer(), progress=calls.append)
    assert len(calls) == count
    (tmp_path / "copy" / "a" / "10b.txt").write_text("one more")
    build_corpus(section("mixed"), ByteTokenizer(), progress=calls.append)
    assert 1 <= len(calls) - count < 31  # itself, and the files of its group
    build_corpus(section("mixed", on_bad_text="skip"), ByteTokenizer(), progress=calls.append)
    assert len(calls) > count + 300


def test_where_documents_come_from_is_kept(texts, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_BYTES", SMALL)
    config = section("mixed")
    store, todo = store_of(config)
    run_tasks(store, todo)
    assert len(todo) > 3
    found = []
    before: dict[Path, int] = {}
    for task in todo:
        part = store.part(task)
        assert len(part.hashes()) == len(part.ends()) == part.documents
        for origin in part.origin():
            file = task.pieces[origin["piece"]].file
            found.append((file, int(origin["line"]) + before.get(file, 0)))
        for piece, facts in zip(task.pieces, part.pieces, strict=True):
            before[piece.file] = before.get(piece.file, 0) + facts.lines
    reader = Reader(config)
    files = split_files(config)
    documents = reader.documents(sorted({*files.train, *files.held_out}))
    lines = [document.line or 0 for document in documents]
    assert [line if file.suffix == ".jsonl" else 0 for file, line in found] == lines


@pytest.mark.parametrize("file", ["ids.bin", "ends.bin", "origin.bin", "hash.bin", "part.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
        lambda path: os.truncate(path, 3),
        lambda path: path.unlink(),
    ],
    ids=["zeros", "truncated", "gone"],
)
def test_a_damaged_part_is_made_again(texts, monkeypatch, file, damage):
    monkeypatch.setattr(tasks, "TASK_BYTES", 20_000)
    name = "mixed" if file == "origin.bin" else "single"
    corpus = build_corpus(section(name), ByteTokenizer())
    before = everything()
    shutil.rmtree(corpus.folder)
    damage(sorted(cache_folder().glob(f"store-*/parts/*/{file}"))[1])
    told: list[str] = []
    assert build_corpus(section(name), ByteTokenizer(), notify=told.append) == corpus
    assert everything() == before
    if file == "part.json" and not told:  # gone: it is a part that was never finished
        return
    assert "is damaged" in told[0] and "tokenizing its text again" in told[0]


def everything():
    """Return the content of all files of the cache but locks, by relative path."""
    root = cache_folder()
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


@pytest.mark.parametrize("also", [[], ["a/01.txt"]])
def test_a_file_without_a_document_gives_none(texts, also):
    (texts / "b" / "nothing.jsonl").write_text("\n\n")
    config = section("single", paths=["b/nothing.jsonl", *also], held_out_fraction=0.1)
    corpus = build_corpus(config, ByteTokenizer())
    assert corpus.train.documents + corpus.held_out.documents == len(also)
    assert corpus.problem() == ""


def test_a_file_that_changes_meanwhile_is_refused(texts, monkeypatch):
    read = Reader.read

    def changing(reader, file, span=None):
        yield from read(reader, file, span)
        if file.name == "big.jsonl":
            with file.open("a") as stream:
                stream.write('{"text": "more"}\n')

    monkeypatch.setattr(Reader, "read", changing)
    with pytest.raises(TrainctlError, match=r"big\.jsonl has changed while it was read"):
        build_corpus(section("single"), ByteTokenizer())
    assert not list(cache_folder().glob("store-*/parts/*"))


def test_a_suspended_worker_accepts_that_another_did_its_task(texts):
    """The other process took the sleeping one for dead and removed its files."""
    store, (task, *_) = store_of(section("files"))
    other, _ = store_of(section("files"))
    slept = []

    def sleep(_):
        if not slept:
            slept.append(True)
            other.do(task)
            other.finish([task])
            assert not list(other.folder.glob("parts/.*"))

    store.do(task, sleep)
    assert slept and store.is_done(task)


def test_a_task_that_two_processes_have_is_done_by_both(texts):
    """Ray and Slurm may repeat a task that runs, and neither may remove the other's files."""
    store, (task, *_) = store_of(section("files"))
    other, _ = store_of(section("files"))
    began = []

    def fail(_):
        if not began:
            began.append(True)
            raise KeyboardInterrupt

    def begin(_):
        if not began:
            with pytest.raises(KeyboardInterrupt):
                other.do(task, fail)

    store.do(task, begin)
    assert began and store.is_done(task)


def test_no_processes_are_started_while_others_have_all_that_is_left(texts, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_BYTES", SMALL)
    store, todo = store_of(section("mixed"))
    pools, passes = [], []
    claimed = {each.key: store.claims.held(each.key) for each in todo[1:]}

    def run_here(self, count, some, done):
        pools.append(len(some))
        for each in some:
            each.call()
            done(each)

    def release(_):
        passes.append(sum(not store.is_done(each) for each in todo))
        if len(passes) == 3:
            for each in claimed.values():
                each.__exit__(None, None, None)

    monkeypatch.setattr(LocalExecutor, "_run_in_pool", run_here)
    monkeypatch.setattr(task_workers.time, "sleep", release)
    for each in claimed.values():
        assert each.__enter__()
    run_tasks(store, todo, executor=LocalExecutor(2), section=RunConfig().tokenizer)
    assert all(map(store.is_done, todo)) and len(todo) > 3
    assert pools == [len(todo), len(todo) - 1] and passes == [len(todo) - 1] * 3


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(texts, monkeypatch):
    monkeypatch.setattr(task_workers, "_free_bytes", lambda folder: 100_000)
    with pytest.raises(TrainctlError, match=r"0\.00 GB free, .* about 0\.00 GB") as caught:
        build_corpus(section("mixed"), ByteTokenizer())
    assert caught.value.exit_code == ExitCode.environment
    assert not list(cache_folder().glob("store-*/parts/*"))
    monkeypatch.setattr(task_workers, "_free_bytes", lambda folder: 10**7)
    build_corpus(section("mixed"), ByteTokenizer())


def test_required_space_is_close_to_the_space_used(texts):
    config = section("mixed")
    store, todo = store_of(config)
    needed = task_workers.space_needed(store, todo, todo)
    corpus = build_corpus(config, ByteTokenizer())
    folders = [Path(corpus.folder), *cache_folder().glob("store-*/parts/*")]
    taken = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    assert taken <= needed < 1.5 * taken


def test_a_packed_text_is_longer_than_its_file(tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "a.txt.gz"]
    files[0].write_bytes(b"some words " * 1000)
    files[1].write_bytes(gzip.compress(files[0].read_bytes()))
    needed = []
    for file in files:
        store, todo = store_of(new_section("data", "files", paths=[str(file)]))
        needed.append(task_workers.space_needed(store, todo, todo) / file.stat().st_size)
    assert needed[1] == pytest.approx(3 * needed[0], rel=0.01)


def test_shares_are_all_of_it_and_the_corpus_is_joined_from_them(texts, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_BYTES", SMALL)
    config = section("mixed")
    builder = CorpusBuilder(config=config, tokenizer=ByteTokenizer(), run_data=config)
    left = [builder.tokenize_share(number, 3) for number in (1, 2, 3)]
    assert left == sorted(left, reverse=True) and left[-1] == 0 < left[1]
    calls: list[PreparationProgress] = []
    corpus = build_corpus(config, ByteTokenizer(), progress=calls.append)
    assert corpus.digest == BEFORE["mixed"][0] and not calls
    with pytest.raises(TrainctlError, match="one task"):
        replace(builder, config=section("whole")).tokenize_share(1, 3)


class WithoutEnd(ByteTokenizer):
    """Tokenizer without an end-of-document token."""

    begin_of_text = begin_of_document = ()
    end_of_document = None
    fingerprint = "no end"


def test_documents_are_told_apart_without_an_id_for_their_end(texts, tmp_path):
    config = section("none")
    corpora = [build_corpus(config, each) for each in (ByteTokenizer(), WithoutEnd())]
    batches = []
    for corpus in corpora:
        ends = corpus.ends(corpus.train)
        assert ends is not None and ends[-1] == corpus.train.tokens
        data = PackedDataset(corpus, corpus.train, sequence_length=512, mask_documents=True)
        batches.append(data.micro_batch(np.arange(8)))
    with_end, without = batches
    assert without.document_ids.max() > 0 and (without.labels == -100).sum() > 0
    starts = (without.position_ids == 0).nonzero().tolist()
    ends = {int(end) for end in corpora[1].ends(corpora[1].train)}
    assert {row * 512 + at for row, at in starts if at} == {
        end for end in ends if end < 8 * 512 and end % 512
    }
    # With an id for the end they tell what looking for the id tells.
    ids = with_end.input_ids
    assert (ids == ByteTokenizer.end_of_document)[:, :-1].equal(with_end.document_ids.diff() > 0)


def test_a_claim_is_one_process_s_and_given_back(tmp_path):
    first, second = Claims(tmp_path), Claims(tmp_path)
    with first.held("x") as ours:
        assert ours
        with second.held("x") as theirs:
            assert not theirs
        with second.held("y") as other:
            assert other
    assert list(tmp_path.iterdir()) == []
    with second.held("x") as again:
        assert again


def test_a_claim_is_taken_over_from_who_is_gone_and_from_who_has_not_stirred(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("trainctl.data.tasks.time.monotonic", lambda: now[0])
    claims = Claims(tmp_path)
    here = claims._here
    (tmp_path / "dead").symlink_to(json.dumps([here, 2**22 + 1, "a", 0]))
    with claims.held("dead") as ours:
        assert ours
    (tmp_path / "far").symlink_to(json.dumps(["another host", 1, "b", 0]))
    for seconds, beat, expected in ((0, 0, False), (100, 0, False), (30, 1, False), (130, 1, True)):
        (tmp_path / "far").unlink()
        (tmp_path / "far").symlink_to(json.dumps(["another host", 1, "b", beat]))
        now[0] += seconds
        with claims.held("far") as ours:
            assert ours is expected
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_was_taken_over_is_not_given_back_twice(tmp_path):
    claims = Claims(tmp_path)
    with claims.held("x"):
        (tmp_path / "x").unlink()
        (tmp_path / "x").symlink_to(json.dumps(["another host", 1, "b", 0]))
    assert (tmp_path / "x").is_symlink()


def test_a_task_of_an_executor_is_claimed_and_done_whoever_had_the_claim(texts, monkeypatch):
    store, (task, *_) = store_of(section("mixed"))
    free: list[bool] = []

    def do(_, todo):
        with Claims(store.folder / "claims").held(todo.key) as is_free:
            free.append(is_free)

    monkeypatch.setattr(TokenStore, "do", do)
    given = task_workers._job_text(store, TokenizerConfig()), json.dumps(task.to_plain()), True
    task_workers.tokenize_task(*given)
    with store.claims.held(task.key):
        task_workers.tokenize_task(*given)
    assert free == [False, False]


def test_a_disk_without_locks_or_links_is_the_machines_fault(tmp_path, monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", missing)
    monkeypatch.setattr(os, "symlink", missing)
    for context in (lock_folder(tmp_path / "x", ignore_message), Claims(tmp_path).held("x")):
        with pytest.raises(TrainctlError, match="No locks available") as caught, context:
            pass
        assert caught.value.exit_code == ExitCode.environment


def test_the_cache_is_a_folder_with_a_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named, folder in (("~/cache", tmp_path / "home" / "cache"), ("cache", tmp_path / "cache")):
        monkeypatch.setenv("TRAINCTL_CACHE_DIR", named)
        assert cache_folder() == folder
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", "s3://bucket/cache")
    with pytest.raises(TrainctlError, match="TRAINCTL_CACHE_DIR=s3://bucket/cache is a URL"):
        cache_folder()


def test_progress_in_words():
    assert str(PreparationProgress(1234)) == "tokenizing: 1,234 documents"
    standing = PreparationProgress(10, size=25_000_000, whole=100_000_000, seconds=10)
    assert str(standing) == "tokenizing: 10 documents, 25%, 2.5 MB/s, 30 s left"
    assert [format_duration(each) for each in (5, 600, 7300)] == ["5 s", "10 min", "2 h 2 min"]


def test_nothing_of_preparation_loads_torch():
    modules = "sys, trainctl.data.__main__, trainctl.data.tokenizer"
    script = f"import {modules}; print('torch' in sys.modules)"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
