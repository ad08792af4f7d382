"""A corpus in a bucket, read through a small folder: by several, with faults, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from functools import partial
from math import inf

import numpy as np
import pytest
from bucket import s3_server

from trainctl.data.streaming import cache as cache_module
from trainctl.data.streaming.cache import ShardCache
from trainctl.data.streaming.corpora import StreamedTokens
from trainctl.data.streaming.transfer import (
    ShardFacts,
    StreamRecord,
    blocks_of_shard,
    corpus_folder_name,
    read_record,
    shard_file_name,
    upload_shards,
)
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers import remote

SHARD = 1000
IDS = np.random.default_rng(0).integers(0, 60_000, 10_500).astype("<u2")
ENDS = np.unique(np.r_[np.random.default_rng(1).integers(1, 10_500, 300), 10_500]).astype("<u8")
HELD_OUT = IDS[:1500], np.array([700, 1500], dtype="<u8")
RECORD = StreamRecord(
    {"digest": "0123456789abcdef0", "dtype": "<u2"}
    | {"train": {"tokens": len(IDS)}, "held_out": {"tokens": len(HELD_OUT[0])}},
    "fingerprint",
    SHARD,
    {},
)
SIDES = {"train": (IDS, ENDS), "held_out": HELD_OUT}


def unheard(_):
    """Nobody listens."""


def never_used_again(_):
    return inf


def cache_of(folder, place, record, *, shards=3, next_use=never_used_again, tell=unheard):
    size = max(facts.size for facts in record.shards["train"])
    fetch = partial(blocks_of_shard, place, record.digest, tell)
    return ShardCache(folder, shards * size, record.facts, fetch, next_use, tell)


@pytest.fixture(scope="module")
def server():
    with s3_server() as started:
        yield started


@pytest.fixture(params=["s3", "folder"])
def place(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "elsewhere")
    request.getfixturevalue("server")
    return f"s3://corpus/{tmp_path.name}"


@pytest.fixture
def record(tmp_path):
    return upload_shards(str(tmp_path / "elsewhere"), RECORD, SIDES, unheard)


@pytest.fixture
def elsewhere(record, tmp_path):
    """Folder that `record` describes."""
    return tmp_path / "elsewhere"


def names(folder):
    return sorted(path.name for path in folder.glob("*.shard*"))


def test_what_is_read_is_what_was_written(place, tmp_path):
    record = upload_shards(place, RECORD, SIDES, unheard)
    assert read_record(place) == record
    cache = cache_of(tmp_path / "cache", place, record)
    for side, (ids, ends) in SIDES.items():
        tokens = StreamedTokens(record, side, cache)
        assert len(tokens) == len(ids)
        for start, stop in [(0, 1001), (990, 1010), (999, 1000), (5, 5), (300, 10**6), (0, None)]:
            assert tokens[start:stop].tolist() == ids[start:stop].tolist()
            stop = len(ids) if stop is None else min(stop, len(ids))
            expected = ends[(ends > start) & (ends <= stop)]
            places = np.searchsorted(tokens.ends, np.array([start, stop], "<u8"), side="right")
            assert places.tolist() == np.searchsorted(ends, [start, stop], side="right").tolist()
            found = tokens.ends[places[0] : places[1]]
            assert found.dtype == ends.dtype and found.tolist() == expected.tolist()
        everywhere = np.arange(len(ids) + 1)
        for where in ("left", "right"):
            expected = np.searchsorted(ends, everywhere, side=where)
            assert (np.searchsorted(tokens.ends, everywhere, side=where) == expected).all()
        assert tokens.ends[len(ends) - 1] == ends[-1] and len(tokens.ends) == len(ends)
        assert cache.size() <= 3 * max(facts.size for facts in record.shards["train"])


def test_a_folder_may_have_any_name(tmp_path):
    place = tmp_path / "my [corpus] 100%25 é?"
    record = upload_shards(str(place), RECORD, SIDES, unheard)
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    assert read_record(str(place)) == record
    tokens = StreamedTokens(record, "train", cache_of(tmp_path / "cache", str(place), record))
    assert tokens[0:10].tolist() == SIDES["train"][0][:10].tolist()


def test_an_interrupted_upload_continues(place, monkeypatch):
    from trainctl.data.streaming import transfer

    put, written = transfer._write_atomically, []

    def put_some(url, raw, tell):
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(url)
        put(url, raw, tell)

    monkeypatch.setattr(transfer, "_AT_ONCE", 1)
    monkeypatch.setattr(transfer, "_write_atomically", put_some)
    with pytest.raises(KeyboardInterrupt):
        upload_shards(place, RECORD, SIDES, unheard)
    with pytest.raises(TrainctlError, match="there is no prepared corpus at"):
        read_record(place)
    again = []
    monkeypatch.setattr(
        transfer,
        "_write_atomically",
        lambda url, raw, tell: (again.append(url), put(url, raw, tell)),
    )
    record = upload_shards(place, RECORD, SIDES, unheard)
    assert not set(written) & set(again) and len(written) + len(again) == 11 + 2 + 1
    assert again[-1].endswith("stream.json") and read_record(place) == record
    other = StreamRecord({**RECORD.corpus, "digest": "another"}, "fingerprint", SHARD, {})
    with pytest.raises(TrainctlError, match="another corpus lies at"):
        upload_shards(place, other, SIDES, unheard)


def test_several_ranks_fetch_each_shard_once_within_the_bound(record, elsewhere, tmp_path):
    fetched, most, failed = [], [], []

    def fetch(name):
        fetched.append(name)
        time.sleep(0.01)
        return blocks_of_shard(str(elsewhere), record.digest, unheard, name)

    size = max(facts.size for facts in record.shards["train"])
    at = [0] * 4

    def rank(number):
        def next_use(name):
            shard = int(name[6:11])
            return inf if shard < min(at) else 0 if shard <= max(at) else shard

        cache = ShardCache(tmp_path / "cache", 3 * size, record.facts, fetch, next_use, unheard)
        tokens = StreamedTokens(record, "train", cache)
        try:
            for shard in range(11):
                at[number] = shard
                while shard > min(at) + 1 and not failed:  # as a collective does
                    time.sleep(0.001)
                start = shard * SHARD + number
                assert tokens[start : start + 300].tolist() == IDS[start : start + 300].tolist()
                cache.fetch_ahead([shard_file_name("train", shard + 1)] if shard < 10 else [])
                most.append(cache.size())
        except BaseException as error:
            failed.append(error)
            at[:] = [99] * 4

    threads = [threading.Thread(target=rank, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(fetched) == [shard_file_name("train", number) for number in range(11)]
    assert max(most) <= 3 * size


def test_what_is_needed_now_is_not_removed_for_what_is_needed_later(record, elsewhere, tmp_path):
    folder = tmp_path / "cache"
    uses = {shard_file_name("train", n): n for n in range(11)}
    cache = cache_of(folder, str(elsewhere), record, shards=2, next_use=uses.__getitem__)
    for _ in range(4):
        cache.fetch_ahead(uses)
    assert names(folder) == ["train-00000.shard", "train-00001.shard"]
    uses["train-00000.shard"] = inf
    cache.fetch_ahead(uses)  # 0 is missing nowhere, 2 has the room of it
    assert names(folder) == ["train-00001.shard", "train-00002.shard"]
    os.close(cache.opened("train-00010.shard"))  # one that is asked for takes the room of the last
    assert names(folder) == ["train-00001.shard", "train-00010.shard"]
    tiny = cache_of(folder, str(elsewhere), record, shards=0.5)
    with pytest.raises(TrainctlError, match="has no room in") as refused:
        tiny.opened("train-00003.shard")
    assert refused.value.exit_code is ExitCode.environment


def test_what_is_not_as_it_was_written_is_fetched_again_and_then_refused(
    record, elsewhere, tmp_path
):
    path = elsewhere / corpus_folder_name(record.digest) / shard_file_name("train", 4)
    right = path.read_bytes()
    wrong = bytes([right[0] ^ 1]) + right[1:]
    told, answers = [], [wrong, right[:-1], right]

    def fetch(name):
        return [answers.pop(0)]

    def cache(tell):
        return ShardCache(tmp_path / "cache", 10**6, record.facts, fetch, never_used_again, tell)

    tokens = StreamedTokens(record, "train", cache(told.append))
    assert tokens[4000:4010].tolist() == IDS[4000:4010].tolist()
    assert len(told) == 2 and "checksum" in told[0] and "not 2," in told[1]
    path = tmp_path / "cache" / shard_file_name("train", 4)
    path.write_bytes(wrong)  # by a disk that forgets
    (tmp_path / "cache" / "train-00005.shard").write_bytes(b"short")
    (tmp_path / "cache" / "other.shard").write_bytes(b"")
    cache(unheard).clean()
    assert names(tmp_path / "cache") == []
    answers = [wrong] * 3
    with pytest.raises(TrainctlError, match="has another checksum") as refused:
        cache(unheard).opened(shard_file_name("train", 4))
    assert refused.value.exit_code is ExitCode.environment and names(tmp_path / "cache") == []


FETCHER = """
import sys, time
from pathlib import Path
from trainctl.data.streaming.cache import ShardCache
from trainctl.data.streaming.transfer import ShardFacts
def fetch(name):
    yield b"x"
    print("begun", flush=True)
    time.sleep(60)
facts = ShardFacts(0, 8, 0)
cache = ShardCache(Path(sys.argv[1]), 100, lambda _: facts, fetch, lambda _: float("inf"), print)
cache.opened("a.shard")
"""


def test_what_a_killed_rank_was_fetching_is_fetched_by_another(tmp_path):
    killed = subprocess.Popen(
        [sys.executable, "-c", FETCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout.readline() == "begun\n"
    raw = b"12345678"
    facts = ShardFacts(0, 8, zlib.crc32(raw))
    cache = ShardCache(tmp_path, 8, lambda _: facts, lambda _: [raw], never_used_again, unheard)
    assert not cache.fetch_ahead(["a.shard", "b.shard"])  # another is at it; no room for b
    assert names(tmp_path) == ["a.shard.tmp"] and cache.size() == 8
    found = []
    waits = threading.Thread(target=lambda: found.append(cache.opened("a.shard")))
    waits.start()
    time.sleep(0.3)
    assert not found
    os.kill(killed.pid, signal.SIGKILL)
    waits.join()
    killed.wait()
    assert os.pread(found[0], 9, 0) == raw and names(tmp_path) == ["a.shard"]
    os.close(found[0])


def test_a_server_that_is_gone_is_waited_for_and_then_given_up_in_words(
    server, tmp_path, monkeypatch, capsys
):
    place = f"s3://corpus/{tmp_path.name}"
    record = upload_shards(place, RECORD, SIDES, unheard)
    waits, told = [], []
    _, port = server.get_host_and_port()

    def comes_back(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            server.start()

    monkeypatch.setattr(remote, "sleep", comes_back)
    server.stop()
    server._port = port
    tokens = StreamedTokens(
        record, "train", cache_of(tmp_path / "cache", place, record, tell=told.append)
    )
    try:
        assert tokens[0:10].tolist() == IDS[:10].tolist()
    finally:
        if len(waits) < 2:
            server.start()
    assert waits == [1, 2] and len(told) == 2 and "attempt 2 of 6 in 1 s" in told[0]
    assert place in told[0]
    server.stop()
    waits[:] = [0] * 9
    try:
        with pytest.raises(TrainctlError, match=f"cannot read {place}.* 6 attempts") as given_up:
            tokens[2000:2010]
    finally:
        server.start()
    assert given_up.value.exit_code is ExitCode.environment
    assert names(tmp_path / "cache") == ["train-00000.shard"]


def test_a_rank_says_that_it_waits_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_TELL_SECONDS", 0.1)
    raw, told = b"12345678", []
    facts = ShardFacts(0, 8, zlib.crc32(raw))

    def slowly(_):
        time.sleep(0.5)
        return [raw]

    caches = [
        ShardCache(tmp_path, 8, lambda _: facts, slowly, never_used_again, told.append)
        for _ in range(2)
    ]
    threads = [threading.Thread(target=lambda c=c: os.close(c.opened("a.shard"))) for c in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) >= 1 and all("another rank of this node fetches" in each for each in told)
