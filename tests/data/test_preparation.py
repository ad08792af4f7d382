"""Preparation that is killed, interrupted, and done by many: nothing is lost and nothing left."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rank_processes import tiny_config, tiny_plan
from small_texts import make_texts

from trainctl.config.registry import new_section
from trainctl.config.schema import TokenizerConfig
from trainctl.data import tasks
from trainctl.data.corpus import build_corpus
from trainctl.data.prepare import assist_preparation
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.processes import is_alive

KILLS = int(os.environ.get("TRAINCTL_SOAK_KILLS", "20"))


@pytest.fixture
def texts(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    make_texts(folder)
    monkeypatch.setattr(tasks, "TASK_BYTES", 12_000)
    return folder


def section(texts):
    paths = [str(texts / "a"), str(texts / "b" / "big.jsonl")]
    return new_section("data", "files", paths=paths, held_out_fraction=0.2)


def everything(cache):
    """Return all entries of a cache with their contents, without locks and the temporary files of
    killed writers, which nobody reads.
    """
    return {
        str(path.relative_to(cache)): path.read_bytes() if path.is_file() else path.is_symlink()
        for path in sorted(cache.rglob("*"))
        if path.suffix != ".lock" and not (path.suffix == ".tmp" and path.name.startswith("."))
    }


def prepare_in(cache, texts, **more):
    os.environ["TRAINCTL_CACHE_DIR"] = str(cache)
    try:
        return build_corpus(section(texts), ByteTokenizer(), **more)
    finally:
        del os.environ["TRAINCTL_CACHE_DIR"]


def forked(cache, texts):
    """Fork a process that prepares the corpus, and return its pid."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            prepare_in(cache, texts)
            os._exit(0)
        os._exit(1)
    return pid


def finished(cache):
    """Return the inode of each finished part, which changes if the part is made again."""
    records = cache.glob("store-*/tasks/[!.]*.json")
    parts = {json.loads(record.read_bytes())["part"]: record.parents[1] for record in records}
    return {
        name: (root / "parts" / name / "part.json").stat().st_ino for name, root in parts.items()
    }


def test_killed_at_any_moment_it_is_finished_as_if_undisturbed(texts, tmp_path, monkeypatch):
    """Preparations are killed at random moments, then one finishes at once: nobody waits for the
    lease of a dead process.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # processes die here, and no disk
    cache = tmp_path / "cache"  # the corpus says where it is, so all have one name
    began = time.monotonic()
    prepare_in(cache, texts)
    longest = time.monotonic() - began
    expected = everything(cache)
    assert sum("part.json" in name for name in expected) > 3
    chance = random.Random(5)
    kills = tries = 0
    stages = set()
    while kills < KILLS:
        tries += 1
        assert tries < 20 * KILLS
        if chance.random() < 0.5 and cache.exists():
            before = finished(cache)
            prepare_in(cache, texts)
            assert everything(cache) == expected
            assert finished(cache).items() >= before.items()  # the same files still
            cache.rename(tmp_path / f"done {tries}")
        pid = forked(cache, texts)
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        was_killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        kills += was_killed
        if was_killed:
            stages.add((len(finished(cache)), len(everything(cache))))
        # How long it takes is another matter each time, on a machine with other work.
        longest *= 1.15 if was_killed else 0.7
    prepare_in(cache, texts)
    assert everything(cache) == expected
    assert len(stages) > min(5, KILLS // 2)  # how far it was: tasks done, and files there


def test_several_processes_make_what_one_makes(texts, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    first = prepare_in(alone, texts)
    shown = []
    second = prepare_in(
        together, texts, tokenizer_section=TokenizerConfig(), workers=3, progress=shown.append
    )
    assert (second.digest, second.bad_text) == (first.digest, first.bad_text)
    assert shown[-1].documents == 331 and shown[-1].size == shown[-1].whole > 0
    ours, theirs = everything(alone), everything(together)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if not name.endswith("corpus.json"))


def test_what_is_wrong_in_another_process_is_reported_as_in_this_one(texts, tmp_path):
    (texts / "a" / "15.txt").write_bytes(b"good\n\xff\n")
    said = []
    for more in ({}, {"tokenizer_section": TokenizerConfig(), "workers": 2}):
        with pytest.raises(TrainctlError) as caught:
            prepare_in(tmp_path / "cache", texts, **more)
        said.append((caught.value.message, caught.value.hint, caught.value.exit_code))
    assert said[0] == said[1]
    assert "15.txt:2: byte 0xff is not UTF-8" in said[0][0]


def test_a_process_that_is_killed_ends_the_preparation_in_words(texts, tmp_path, monkeypatch):
    more = {"tokenizer_section": TokenizerConfig(), "workers": 2}
    start = multiprocessing.process.BaseProcess.start

    def start_to_kill(process):
        start(process)
        threading.Timer(0.3, process.kill).start()  # while it imports

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start_to_kill)
    with pytest.raises(TrainctlError, match="was killed, with 9 of 9 tasks left") as caught:
        prepare_in(tmp_path / "cache", texts, **more)
    assert caught.value.exit_code == ExitCode.environment
    monkeypatch.undo()
    prepare_in(tmp_path / "cache", texts, **more)


def children_of(pid):
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
    ],
)
def test_an_interrupted_command_leaves_no_process_and_continues(tmp_path, number):
    """While its workers are in the middle of a long text; then it is asked for another one."""
    folder = tmp_path / "texts"
    folder.mkdir()
    line = json.dumps({"text": "some words of it " * 20}) + "\n"
    (folder / "long.jsonl").write_text(line * 300_000)
    command = [
        *(sys.executable, "-m", "trainctl", "data", "prepare", "tiny", "data=files"),
        *(f"data.paths=[{folder}]", "--workers", "2"),
    ]
    environment = {**os.environ, "TRAINCTL_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(workers := children_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        while not list(tmp_path.glob("cache/store-*/parts/.*/ids.bin")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, talk = process.communicate(timeout=30)
    assert process.returncode in (-number, 128 + number), talk
    assert "Traceback" not in talk
    deadline = time.monotonic() + 10
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (folder / "long.jsonl").unlink()
    (folder / "short.txt").write_text("words " * 1000)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "tokens to train on" in again.stdout


def test_the_command_tells_as_json_and_does_a_share(texts, tmp_path, capsys, monkeypatch):
    from trainctl.cli.main import run

    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    what = ["data", "prepare", "tiny", "data=files", f"data.paths=[{texts}/b/big.jsonl]", "--json"]
    assert run([*what, "--task", "2/2"]) == 0
    share = json.loads(capsys.readouterr().out)
    assert share["left"] > 0 and share["documents"] > 0
    assert run(what) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["train"]["documents"] + whole["held_out"]["documents"] == 300
    assert 0 < whole["documents_tokenized"] == 300 - share["documents"]
    assert run(what) == 0
    assert json.loads(capsys.readouterr().out)["documents_tokenized"] == 0


@pytest.mark.parametrize("share", ["0/2", "3/2", "x", "1/0", "1", "-1/2"])
def test_invalid_shares_are_refused(share, capsys):
    from trainctl.cli.main import run

    assert run(["data", "prepare", "tiny", "--task", share]) == ExitCode.bad_input
    assert "I/N" in capsys.readouterr().err


def test_a_tokenizer_that_validate_refuses_prepares_nothing(texts, tmp_path, capsys, monkeypatch):
    """The first tokenizer's id exceeds the model's 512 rows. The second one's id is refused by
    itself.
    """
    from trainctl.cli.main import run

    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    vocabulary = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    file = tmp_path / "tokenizer.json"
    what = ["tiny", "data=files", f"data.paths=[{texts}]", "tokenizer=file"]
    for number, words in ((600, "has ids up to 600"), (999_999_999, "the id 999,999,999")):
        added = [{"id": number, "content": "</s>"}]
        file.write_text(json.dumps({**vocabulary, "added_tokens": added}))
        for command in (["validate", f"recipe={what[0]}"], ["data", "prepare", what[0]]):
            assert run([*command, *what[1:], f"tokenizer.path={file}"]) == ExitCode.bad_input
            assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_other_nodes_tokenize_and_the_first_puts_together(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    config = tiny_config(steps=4, sequence_length=64)
    config.data = section(texts)
    assist_preparation(tiny_plan(config, 1))
    assert not list(tmp_path.glob("cache/corpus-*"))
    calls = []
    corpus = build_corpus(config.data, ByteTokenizer(), progress=calls.append)
    assert corpus.train.documents > 0 and not calls
    (texts / "a" / "01.txt").write_bytes(b"\xff")
    assist_preparation(tiny_plan(config, 1))  # the first node says what is wrong


def test_two_at_once_share_the_work(texts, tmp_path):
    """The processes act like machines that share a cache: a task's second taker waits for the
    first.
    """
    pids = [forked(tmp_path / "cache", texts) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    found = everything(tmp_path / "cache")
    prepare_in(tmp_path / "cache", texts)
    assert everything(tmp_path / "cache") == found
    stores = {Path(name).parts[0] for name in found if name.startswith("store-")}
    assert len(stores) == 1
    assert not [name for name in found if "/claims/" in name or "/." in name]
