"""Rewards in processes of their own: values, order, and functions that raise, hang and die."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from trainctl.cli.record_lines import record_lines
from trainctl.config.registry import function_of, part_class
from trainctl.data.rewards import RewardProcesses, SampledAnswer, weighted_sum
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.reward import RewardsConfig, RewardSection
from trainctl.options.reward.exact_answer import final_answer
from trainctl.runs.records import EventWriter, read_events


def reward(kind: str, **keys: Any) -> Any:
    return part_class(RewardSection, kind)(kind=kind, **keys)


def section(rewards: dict[str, Any], **keys: Any) -> RewardsConfig:
    return RewardsConfig(rewards=rewards, **keys)


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the folder of the user's functions, as a rank works in that of the launch."""
    folder = Path(__file__).parent
    monkeypatch.chdir(folder)
    return folder


def test_rewards_are_in_the_order_of_the_answers_whatever_the_processes(in_folder: Path) -> None:
    answers = [
        SampledAnswer("2 + 2 =", "a" * (n % 5) + "b" * (n % 3), {"answer": 4}, n) for n in range(40)
    ]
    call = "reward_functions:count_letters"
    rewards = {
        "letters": reward("function", call=call, arguments={"letter": "b"}, weight=2.0),
        "length": reward("length", most_tokens=30, soft_tokens=10, weight=0.5),
    }
    records: list[Any] = []
    found = []
    for processes in (1, 3):
        chosen = section(rewards, reward_processes=processes)
        with RewardProcesses(chosen, lambda *a, **k: records.append((a, k))) as started:
            found.append(started.score(answers))
    assert found[0] == found[1]
    assert not records
    assert found[0][0] == {"letters": None, "length": 0.0}
    assert found[0][4] == {"letters": 0.2, "length": 0.0}
    assert found[0][25]["length"] == -0.5
    assert found[0][35]["length"] == -1.0
    assert weighted_sum(chosen, {"letters": 0.25, "length": -0.5}) == 0.25
    assert weighted_sum(chosen, {"letters": None, "length": -0.5}) == -0.25


def test_a_bad_function_is_a_record_and_the_next_answer_is_scored(
    in_folder: Path, tmp_path: Path
) -> None:
    texts = [
        "fine",
        "raise",
        "exit",
        "die",
        "hang",
        "fill",
        "text",
        "nan",
        "none",
        "print",
        "raise",
    ]
    columns = {"tokens": 5, "pid_file": str(tmp_path / "pid")}
    answers = [
        SampledAnswer(f"password=hunter2 {n}", text, columns, n) for n, text in enumerate(texts)
    ]
    rewards = {"bad": reward("function", call="reward_functions:misbehave")}
    records: list[tuple[str, dict[str, Any]]] = []
    kept: list[tuple[int, float | None, float]] = []

    def keep(row: int, scored: dict[str, float | None]) -> None:
        kept.append((row, scored["bad"], time.monotonic()))

    chosen = section(rewards, reward_timeout=1.0)
    with RewardProcesses(chosen, lambda kind, **fields: records.append((kind, fields))) as started:
        found = [each["bad"] for each in started.score(answers, keep=keep)]
        again = started.score(answers[:1])
    assert str(found) == str([5.0, *[math.nan] * 7, None, 5.0, math.nan])
    assert again == [{"bad": 5.0}]
    assert [each[0] for each in kept] == list(range(len(found)))
    assert str([each[1] for each in kept]) == str(found)
    assert weighted_sum(chosen, {"bad": math.nan}) == 0.0
    assert kept[4][2] - kept[0][2] > 1  # what is known is told while the fifth hangs
    assert {kind for kind, _ in records} == {"reward_failed"}
    reasons = {fields["first_answer"]: fields["reason"] for _, fields in records}
    assert sorted(reasons) == [1, 2, 3, 4, 5, 6, 7, 10]  # None is no failure
    assert "ValueError: no answer to" in reasons[1]
    assert "reward_functions.py:" in reasons[1]
    assert reasons[3] == "ended with exit code 7"
    assert reasons[4] == "took more than 1 s"
    assert reasons[5] == "takes more than objective.reward_memory"
    assert "'1.0', which is no finite number" in reasons[6]
    assert "nan, which is no finite number" in reasons[7]
    assert not any("hunter2" in str(fields) for _, fields in records)
    hung = int((tmp_path / "pid").read_text())
    assert not is_running_in_group(hung)


def test_no_reward_is_that_of_another_answer(in_folder: Path) -> None:
    """A fork that falls through, a message that never ends, one of 2 GB, one that is no object."""
    prompts = ["", "fork", "", "00000fff", "", "7fffffff", "", "000000025b5d", ""]
    answers = [SampledAnswer(prompt, str(n), {}, n) for n, prompt in enumerate(prompts)]
    rewards = {"own": reward("function", call="reward_functions:write_to_its_parent")}
    records: list[dict[str, Any]] = []
    chosen = section(rewards, reward_timeout=1.0)
    with RewardProcesses(chosen, lambda kind, **fields: records.append(fields)) as started:
        found = [each["own"] for each in started.score(answers)]
    assert str(found) == "[0.0, 1.0, 2.0, nan, 4.0, nan, 6.0, nan, 8.0]"
    (record,) = records
    assert record["reason"] == "sent what is no reply to its question"
    assert (record["first_answer"], record["count"]) == (3, 3)


def is_running_in_group(group: int) -> bool:
    """Whether a process of the group runs; killed ones may still be there as zombies."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def test_same_failures_are_one_record_that_is_shown(in_folder: Path, tmp_path: Path) -> None:
    rewards = {"bad": reward("function", call="reward_functions:misbehave")}
    with EventWriter(tmp_path / "events.jsonl", 1) as events:
        with RewardProcesses(section(rewards), events.write) as started:
            started.score([SampledAnswer("p", "exit", {}, n) for n in range(5)], step=7)
            started.score([SampledAnswer(str(n), "raise", {}, n) for n in range(30)])
    first, *others = read_events(tmp_path / "events.jsonl")
    assert (first["reward"], first["first_answer"], first["count"]) == ("bad", 0, 5)
    (line,) = record_lines(first, stop_step=9)
    assert line.startswith("step 7: the reward bad failed for 5 of 5 answers: SystemExit: 3")
    assert len(others) == 10


@pytest.mark.parametrize(
    ("chosen", "words", "code"),
    [
        (reward("function", call="reward_functions:missing"), "has no missing", 2),
        (reward("function", call="no_such_module:f"), "No module named 'no_such_module'", 2),
        (reward("regex", pattern="("), "no regular expression", 2),
        (reward("json_schema", schema={"type": 3}), "no JSON Schema", 2),
        (reward("json_schema", file="missing.json"), "missing.json", 2),
        (reward("length"), "most_tokens", 2),
    ],
)
def test_a_reward_that_cannot_be_loaded_ends_the_run(
    in_folder: Path, chosen: Any, words: str, code: int
) -> None:
    with pytest.raises(TrainctlError) as caught:
        RewardProcesses(section({"mine": chosen}), print)
    assert words in caught.value.message
    assert caught.value.message.startswith("objective.rewards.mine: ")
    assert caught.value.exit_code == ExitCode(code)


def test_processes_end_with_the_context(in_folder: Path) -> None:
    with RewardProcesses(section({"a": reward("regex", pattern="a")}), print) as started:
        (pid,) = [process._process.pid for process in started._processes]
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


_HANGS = """
from trainctl.config.registry import part_class
from trainctl.data.rewards import RewardProcesses, SampledAnswer
from trainctl.options.reward import RewardsConfig, RewardSection
chosen = part_class(RewardSection, "function")(kind="function", call="reward_functions:misbehave")
with RewardProcesses(RewardsConfig(rewards={"bad": chosen}, reward_timeout=600), print) as started:
    started.score([SampledAnswer("", "hang", {"pid_file": "PID_FILE"}, 1)])
"""


def test_a_hanging_reward_ends_with_its_rank(in_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = _HANGS.replace("PID_FILE", str(file))
    with subprocess.Popen([sys.executable, "-c", code], cwd=in_folder) as rank:
        wait_until(lambda: file.exists() and bool(file.read_text()))
        rank.kill()
    wait_until(lambda: not is_running(int(file.read_text())))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 7 = 42", Decimal(42)),
        ("first 3, then 42.0.", Decimal("42.0")),
        ("It costs $1,234.50", Decimal("1234.50")),
        ("2 and 3\n#### 42\nor 43", Decimal(42)),
        ("#### 1\n#### -42", Decimal(-42)),
        (r"so \boxed{\frac{1}{2}} of 4", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{42}", Decimal(42)),
        (r"\boxed{42} or \boxed{7", Decimal(42)),
        (r"\boxed{.5}", Decimal("0.5")),
        ("the share is $.50.", Decimal("0.5")),
        ("-.5", Decimal("-0.5")),
        ("about 1e5", Decimal(100000)),
        ("about -1.5E-3.", Decimal("-0.0015")),
        ("1e99999999999999999999", Decimal("99999999999999999999")),
        ("...Paris.", "paris"),
        ("  the  Seine ", "the seine"),
        ("", ""),
    ],
)
def test_final_answers(text: str, answer: object) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("chosen", "answer", "columns", "value"),
    [
        (reward("exact_answer"), "= 042", {"answer": "40 + 2 = 42\n#### 42"}, 1.0),
        (reward("exact_answer"), "= 41", {"answer": 42}, 0.0),
        (reward("exact_answer", column="city", wrong=-1.0), "Rome", {"city": "Paris"}, -1.0),
        (reward("regex", pattern="<a>.*</a>"), " <a>x\ny</a>\n", {}, 1.0),
        (reward("regex", pattern="a+"), "ba", {}, 0.0),
        (reward("regex", pattern="a+", whole=False), "ba", {}, 1.0),
        (reward("json_schema"), '{"a": 1}', {}, 1.0),
        (reward("json_schema"), '```json\n{"a": 1}\n```', {}, 1.0),
        (reward("json_schema"), "{", {}, 0.0),
        (reward("json_schema", schema={"required": ["b"]}), '{"a": 1}', {}, 0.0),
        (reward("json_schema", column="schema"), "3", {"schema": '{"type": "string"}'}, 0.0),
        (reward("length", most_tokens=10), "", {"answer_tokens": 10}, 0.0),
        (reward("length", most_tokens=10), "", {"answer_tokens": 11}, -1.0),
        (reward("length", most_tokens=10, soft_tokens=4), "", {"answer_tokens": 6}, 0.0),
        (reward("length", most_tokens=10, soft_tokens=4), "", {"answer_tokens": 7}, -0.25),
        (reward("length", most_tokens=10, soft_tokens=4), "", {"answer_tokens": 10}, -1.0),
    ],
)
def test_shipped_rewards(chosen: Any, answer: str, columns: dict[str, Any], value: float) -> None:
    assert function_of("reward", chosen.kind)(chosen)("", answer, columns) == value


def test_the_length_is_punished_as_trl_does_it() -> None:
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    ours = function_of("reward", "length")(reward("length", most_tokens=20, soft_tokens=8))
    lengths = range(1, 25)
    expected = theirs(completions=None, completion_ids=[[0] * n for n in lengths])
    assert [ours("", "", {"answer_tokens": n}) for n in lengths] == pytest.approx(expected)
