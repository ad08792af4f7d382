"""Questions to child processes: whatever comes back, no traceback, no hang, no foreign reply."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.child_processes import Channel, ChildProcess, NoReply, ReplyTimeout
from trainctl.config.registry import part_class
from trainctl.data import rewards
from trainctl.data.rewards import RewardProcesses, SampledAnswer
from trainctl.options.reward import RewardsConfig, RewardSection

HEADER = struct.Struct("!8sQ")


class HostileChild(Channel):
    """A thread in place of a reward's process, which does to each question what it is told."""

    def __init__(self, *_: Any, **__: Any) -> None:
        ours, its = socket.socketpair()
        super().__init__(ours)
        self._thread = Thread(target=play, args=(its,), daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return not self.is_readable()

    def kill(self) -> None:
        self.close()
        self._thread.join()


def play(connection: socket.socket) -> None:
    with suppress(OSError), connection, connection.makefile("rb") as stream:
        while header := stream.read(HEADER.size):
            identity, length = HEADER.unpack(header)
            question = json.loads(stream.read(length))
            told = question["columns"]["told"] if "columns" in question else [["loaded", ""]]
            for kind, content in told:
                if kind == "close":
                    return
                connection.sendall(message(kind, content, identity, question.get("answer")))


def message(kind: str, content: str, identity: bytes, answer: str | None) -> bytes:
    own = json.dumps({"reward": float(answer or 0)}).encode()
    parts = {
        "loaded": (identity, b'{"is_loaded": true}'),
        "reply": (identity, own),
        "stale": (bytes(8), own),
        "text": (identity, content.encode("utf-8", "surrogateescape")),
    }
    if kind in parts:
        identity, text = parts[kind]
        return HEADER.pack(identity, len(text)) + text
    return {
        "raw": content.encode("utf-8", "surrogateescape"),
        "part": HEADER.pack(identity, len(own) + 50) + own,
        "huge": HEADER.pack(identity, (1 << 64) - 1) + own,
    }[kind]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["reward", "failed", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
TEXTS = st.one_of(
    VALUES.map(json.dumps),
    st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
    st.just("[" * 3000),
)
MESSAGES = st.one_of(
    st.tuples(st.sampled_from(["reply", "reply", "stale", "part", "huge", "close"]), st.just("")),
    st.tuples(st.sampled_from(["text", "raw"]), TEXTS),
)
ANSWERS = st.lists(st.lists(MESSAGES, min_size=1, max_size=3), min_size=1, max_size=4)


def may_be(told: list[tuple[str, str]], own: float) -> list[float | None]:
    """Return the rewards that an answer may get, besides a failure."""
    found: list[float | None] = [own] if any(kind == "reply" for kind, _ in told) else []
    for kind, content in told:
        try:
            reply = json.loads(content) if kind == "text" else None
        except (ValueError, RecursionError):
            continue
        if isinstance(reply, dict) and "reward" in reply:
            found.append(reply["reward"])
    return found


def check(answers: list[list[tuple[str, str]]]) -> None:
    section = part_class(RewardSection, "regex")(kind="regex", pattern="a")
    chosen = RewardsConfig(rewards={"own": section}, reward_timeout=0.01)
    asked = [SampledAnswer("", str(n + 1), {"told": told}, n) for n, told in enumerate(answers)]
    records: list[dict[str, Any]] = []
    begin = time.monotonic()
    with RewardProcesses(chosen, lambda kind, **fields: records.append(fields)) as started:
        found = [each["own"] for each in started.score(asked)]
    assert time.monotonic() - begin < 20
    for n, (value, told) in enumerate(zip(found, answers, strict=True)):
        assert (value is not None and math.isnan(value)) or value in may_be(told, n + 1)
    assert str(found).count("nan") == sum(record["count"] for record in records)


@given(ANSWERS)
@settings(max_examples=50, deadline=None)
def test_a_hostile_reward_process(answers: list[list[tuple[str, str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "ChildProcess", HostileChild)
        check(answers)


@pytest.mark.slow
@given(ANSWERS)
@settings(max_examples=2000, deadline=None)
def test_two_thousand_hostile_reward_processes(answers: list[list[tuple[str, str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "ChildProcess", HostileChild)
        check(answers)


CHILD = """
import os, sys, time
from trainctl.child_processes import serve
def answer(question):
    print("printed", flush=True)
    if question == b"sleep":
        time.sleep(60)
    if question == b"fork":
        os.fork()
    if question == b"die":
        os._exit(7)
    return question[::-1]
serve(answer)
"""


def test_a_process_answers_one_question_after_the_other() -> None:
    with ChildProcess(["-P", "-c", CHILD]) as child:
        long = os.urandom(3_000_000)
        assert child.ask(long, 60) == long[::-1]
        assert child.ask(b"fork", 60) == b"krof"
        assert child.ask(b"ab", 60) == b"ba"
        assert child.is_idle
        with pytest.raises(NoReply, match="no JSON object"):
            child.ask_json({}, 60)
        with pytest.raises(NoReply, match="of 5 bytes, and at most 4 are taken"):
            child.ask(b"12345", 60, most_bytes=4)
    with ChildProcess(["-P", "-c", CHILD]) as child:
        with pytest.raises(NoReply, match="ended with exit code 7"):
            child.ask(b"die", 60)
        assert not child.is_idle
    with ChildProcess(["-P", "-c", CHILD]) as child:
        assert child.ask(b"12", 60) == b"21"
        with pytest.raises(ReplyTimeout, match=r"took more than 0\.1 s"):
            child.ask(b"sleep", 0.1)


def test_a_question_that_nobody_reads_is_a_timeout() -> None:
    ours, its = socket.socketpair()
    with its, pytest.raises(ReplyTimeout):
        Channel(ours).ask(bytes(50_000_000), 0.05)
    ours.close()


def test_infinite_rewards_are_none() -> None:
    for text in ('{"reward": NaN}', '{"reward": Infinity}', '{"reward": 1e999}', "{}"):
        with pytest.raises(NoReply):
            rewards._reward_in(json.loads(text))
    assert not math.isfinite(json.loads("1e999"))
