"""TensorBoard's files: what TensorBoard reads is the run as it stands, each step once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from processes import cursor, following, send, wait_for
from records_of_runs import append, draw, losses, new_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter, read_events
from trainctl.runs.rollouts import write_rollouts


def read(run: RunPaths, tag: str) -> list[tuple[int, float]]:
    """Read a scalar's points by TensorBoard's own reader."""
    files = EventAccumulator(str(run.root / "tensorboard"), size_guidance={"scalars": 0})
    files.Reload()
    return [(event.step, event.value) for event in files.Scalars(tag)]


def check(run: RunPaths) -> None:
    train, evaluations = losses(run)
    for tag, curve in (("train/loss", train), ("evaluation/loss", evaluations)):
        found, expected = read(run, tag), sorted(curve.items())
        assert [step for step, _ in found] == [step for step, _ in expected]
        np.testing.assert_array_equal(
            [loss for _, loss in found], np.float32([loss for _, loss in expected])
        )


def written(run: RunPaths) -> Counter[tuple[int, float]]:
    """Step and time of all points in the files, those that others have replaced among them."""
    files = sorted((run.root / "tensorboard").iterdir())
    raw = [record for path in files for record in RawEventFileLoader(str(path)).Load()]
    events = [Event.FromString(record) for record in raw]
    return Counter((event.step, event.wall_time) for event in events if event.HasField("summary"))


def test_tensorboard_reads_the_run_as_it_stands(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(1, 300))
    assert send(run, "tensorboard") == (0, "")
    check(run)
    learning_rates = read(run, "train/learning_rate/1")
    assert len(learning_rates) == 300 and {rate for _, rate in learning_rates} == {0.25}


def test_sampled_answers_are_a_text_of_their_step(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(1, 4))
    write_rollouts(run, 3, [answer(2 + 2, "4 | <b>\nfour"), *(answer(n, "?") for n in range(9))])
    assert send(run, "tensorboard") == (0, "")
    files = EventAccumulator(str(run.root / "tensorboard"))
    files.Reload()
    (found,) = files.Tensors("train/answers")
    assert found.step == 3
    assert files.SummaryMetadata("train/answers").plugin_data.plugin_name == "text"
    (text,) = found.tensor_proto.string_val
    head, _, first, *rest = text.decode().splitlines()
    assert head == "| prompt | answer | reward | rewards | advantage |" and len(rest) == 3
    assert first == "| 4 = | 4 \\| &lt;b&gt;<br>four | 0.5 | exact 1, short none | -1.25 |"


def answer(prompt: int, text: str) -> dict[str, object]:
    """Return a sampled answer."""
    rewards = {"exact": 1.0, "short": None}
    numbers = {"number": 0, "sample": 0, "tokens": 3, "reward": 0.5, "advantage": -1.25}
    texts = {"prompt": f"{prompt} =", "answer": text}
    return {**numbers, **texts, "is_finished": True, "rewards": rewards}


def test_records_of_callbacks_are_series_of_their_own(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with EventWriter(run.events, 1) as writer:
        for step in (1, 2, 3, 2):  # the run goes back once
            writer.write("step", step=step, loss=1.0)
            for name in ("norms", "rates"):
                values = {"mean": 10.0 * step, "text": "none"}
                writer.write("callback", step=step, callback="mine", name=name, values=values)
    assert send(run, "tensorboard") == (0, "")
    for name in ("norms", "rates"):
        assert read(run, f"mine/{name}/mean") == [(1, 10.0), (2, 20.0)]


@pytest.mark.slow
def test_kills_write_no_point_twice(tmp_path: Path) -> None:
    run, chance = new_run(tmp_path), random.Random(2)
    records = list(draw(2, 500))
    while records:
        with following(run, "tensorboard") as process:
            sent = cursor(run, "tensorboard")["points"]
            part, records = records[:200], records[200:]
            append(run, iter(part[:100]))
            wait_for(lambda sent=sent: cursor(run, "tensorboard")["points"] > sent)
            append(run, iter(part[100:]))
            time.sleep(chance.random() * 0.6)
            os.kill(process.pid, signal.SIGKILL)
    assert send(run, "tensorboard") == (0, "")
    check(run)
    of_run = Counter(
        (event["step"], event["time"])
        for event in read_events(run.events)
        if event["event"] in ("step", "evaluation")
    )
    assert written(run) == of_run


def test_what_was_written_after_the_commit_is_taken_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    records = list(draw(3, 200))
    append(run, iter(records[:100]))
    assert send(run, "tensorboard") == (0, "")
    before = run.companion("tensorboard").cursor.read_text()
    (first,) = (run.root / "tensorboard").iterdir()
    append(run, iter(records[100:]))
    assert send(run, "tensorboard") == (0, "")
    run.companion("tensorboard").cursor.write_text(before)
    with first.open("ab") as stream:
        stream.write(b"half a rec")
    assert send(run, "tensorboard") == (0, "")
    check(run)
    assert max(written(run).values()) == 1
    run.companion("tensorboard").cursor.unlink()
    assert send(run, "tensorboard") == (0, "")
    check(run)
    assert max(written(run).values()) == 1
