"""Rewards of sampled answers, each computed in processes of its own. No torch.

A reward is the user's code, or follows what the model wrote: it may raise, hang, fill the memory or
end its process. So a process of its own computes it, within limits, and whatever goes wrong is a
record `reward_failed`; the process is started again. Both sides exchange JSON
(`trainctl.child_processes`), so nothing that comes back can run code here.

Rewards are functions of the row alone, so rank 0 computes those of the global batch for all ranks,
and no layout changes them.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, Self

from trainctl.child_processes import ChildProcess, NoReply, parse_object, serve
from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import function_of
from trainctl.config.secrets import redact_text
from trainctl.data.user_functions import in_words, load_user_function, make_importable
from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.options.reward import RewardsConfig, RewardSection, Score
from trainctl.options.reward.function import FunctionRewardConfig
from trainctl.options.reward.length import ANSWER_TOKENS
from trainctl.runs.processes import die_with_parent

_START_SECONDS = 120.0
"""Time limit for importing a reward: packages on a network file system are slow the first time."""
_EXCERPT = 200
"""Maximum characters of a prompt and of a reason in a record."""

_MOST_RECORDS = 10
"""Maximum records of a step: a reason may name the answer, and then each has one of its own."""

_MOST_CHARACTERS = 10_000
"""Maximum characters of an error that a process sends."""

_REPLY_BYTES = 1 << 20

_COMMAND = "from trainctl.data.rewards import serve_reward; serve_reward({})"


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled answer to be scored."""

    prompt: str
    text: str
    columns: Mapping[str, Any]
    """Other columns of the prompt's record, as plain JSON."""
    tokens: int
    """Number of the answer's tokens; rewards find it as the column `answer_tokens`."""


class RewardProcesses:
    """The processes that compute the rewards of a run; a context manager.

    Attributes:
        reasons: Why each reward last failed, by its name.

    Args:
        section: The objective's section.
        record: Writes a record: called with its kind and fields, as `EventWriter.write` is.

    Raises:
        TrainctlError: A reward cannot be loaded.
    """

    def __init__(self, section: RewardsConfig, record: Callable[..., object]) -> None:
        self._record = record
        self.reasons: dict[str, str] = {}
        self._pools: dict[str, SimpleQueue[_RewardProcess]] = {}
        self._processes: list[_RewardProcess] = []
        self._threads = {
            name: ThreadPoolExecutor(section.reward_processes, f"reward-{name}")
            for name in section.rewards
        }
        try:
            for name, reward in section.rewards.items():
                self._pools[name] = SimpleQueue()
                for _ in range(section.reward_processes):
                    self._processes.append(_RewardProcess(name, reward, section))
                    self._pools[name].put(self._processes[-1])
            for process in self._processes:
                process.wait_until_loaded()
        except BaseException:
            self.close()
            raise

    def score(
        self,
        answers: Sequence[SampledAnswer],
        *,
        step: int = 0,
        keep: Callable[[int, dict[str, float | None]], None] = lambda row, rewards: None,
    ) -> list[dict[str, float | None]]:
        """Return the rewards of each answer by their names, in the order of the answers.

        A reward is None if it does not apply to the answer, and NaN if it has failed. For failures
        of one reward for the same reason, a record names the first answer and counts all; the most
        frequent reasons have one.

        Args:
            step: Optimizer step that learns from the answers, for the records.
            keep: Called with the place and the rewards of each answer, in order, as soon as it and
                those before it have their rewards.
        """
        pending = [
            {
                name: threads.submit(self._score_one, name, answer)
                for name, threads in self._threads.items()
            }
            for answer in answers
        ]
        scored: list[dict[str, float | None]] = []
        failures: dict[tuple[str, str], list[int]] = {}
        for row, by_name in enumerate(pending):
            found = {name: future.result() for name, future in by_name.items()}
            scored.append(
                {name: math.nan if isinstance(x, str) else x for name, x in found.items()}
            )
            keep(row, scored[-1])
            for name, reason in found.items():
                if isinstance(reason, str):
                    self.reasons[name] = redact_text(reason[:_EXCERPT])
                    failures.setdefault((name, reason), []).append(row)
        most_frequent = sorted(failures.items(), key=lambda each: -len(each[1]))
        for (name, reason), rows in most_frequent[:_MOST_RECORDS]:
            self._record(
                "reward_failed",
                step=step,
                reward=name,
                reason=redact_text(reason[:_EXCERPT]),
                first_answer=rows[0],
                prompt=redact_text(answers[rows[0]].prompt[:_EXCERPT]),
                count=len(rows),
                answers=len(answers),
            )
        return scored

    def _score_one(self, name: str, answer: SampledAnswer) -> float | str | None:
        """Return the reward of an answer, or as text why it has failed."""
        process = self._pools[name].get()
        try:
            return process.score(answer)
        finally:
            self._pools[name].put(process)

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def weighted_sum(section: RewardsConfig, rewards: Mapping[str, float | None]) -> float:
    """Return the reward of an answer: its rewards times their weights. None and NaN count as 0."""
    return math.fsum(
        section.rewards[name].weight * value
        for name, value in rewards.items()
        if value is not None and not math.isnan(value)
    )


class _RewardProcess:
    """One process of a reward, started again when it is needed after it has failed."""

    def __init__(self, name: str, reward: RewardSection, section: RewardsConfig) -> None:
        self._name, self._section = name, section
        self._setup = {
            "name": name,
            "reward": to_plain(reward),
            "memory": section.reward_memory,
            "folder": str(Path.cwd()),
        }
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        command = ["-P", "-c", _COMMAND.format(os.getpid())]
        self._process = ChildProcess(command, has_own_session=True)
        self._is_loaded = False
        with suppress(NoReply):  # it has ended already: the next message tells
            self._process.send(json.dumps(self._setup).encode(), _START_SECONDS)

    def wait_until_loaded(self) -> None:
        """Wait until the process can score answers.

        Raises:
            TrainctlError: The reward cannot be loaded.
        """
        if self._is_loaded:
            return
        key = f"objective.rewards.{self._name}"
        try:
            match parse_object(self._process.receive(_START_SECONDS, _REPLY_BYTES)):
                case {"error": str(error), "hint": str(hint), "exit_code": int(code)}:
                    raise TrainctlError(f"{key}: {error}", hint=hint, exit_code=ExitCode.of(code))
                case {"is_loaded": True}:
                    self._is_loaded = True
                case _:
                    raise NoReply("sent a reply of another kind")
        except NoReply as failed:
            raise MachineError(
                f"{key} cannot be loaded: its process {failed}",
                hint="objective.reward_memory gives it more memory, if its packages need that",
            ) from None

    def score(self, answer: SampledAnswer) -> float | str | None:
        columns = {**answer.columns, ANSWER_TOKENS: answer.tokens}
        question = {"prompt": answer.prompt, "answer": answer.text, "columns": columns}
        try:
            if not self._is_closed and self._is_loaded and not self._process.is_idle:
                self._restart()
            self.wait_until_loaded()
            seconds = self._section.reward_timeout
            return _reward_in(self._process.ask_json(question, seconds, _REPLY_BYTES))
        except (NoReply, TrainctlError) as failed:
            self._restart()
            return str(failed)

    def _restart(self) -> None:
        if not self._is_closed:
            self._process.kill()
            self._start()

    def kill(self) -> None:
        """Kill the process and what it started."""
        self._is_closed = True
        self._process.kill()


def _reward_in(reply: dict[str, Any]) -> float | str | None:
    """Return the reward in a reply, or as text why it has failed.

    Raises:
        NoReply: It has neither.
    """
    match reply:
        case {"failed": str(reason)}:
            return reason
        case {"reward": None}:
            return None
        case {"reward": float(number)} if math.isfinite(number):
            return number
    raise NoReply("sent a reply without a reward")


def load_reward_function(section: FunctionRewardConfig) -> Score:
    """Return the user's function with its further arguments.

    Raises:
        TrainctlError: It cannot be imported.
    """
    function = load_user_function("call", section.call)
    return partial(function, **section.arguments)


def serve_reward(parent: int) -> NoReturn:
    """Load the reward that the first question describes, and score answers until the parent ends.

    Args:
        parent: Process id of the parent.
    """
    die_with_parent(parent)
    score: Score | None = None

    def answer(question: bytes) -> bytes:
        nonlocal score
        asked = json.loads(question)
        reply: dict[str, Any]
        if score is None:
            score, reply = _load(asked)
        else:
            reply = _score(score, asked)
        return json.dumps(reply).encode()

    serve(answer)


def _load(setup: Mapping[str, Any]) -> tuple[Score | None, dict[str, Any]]:
    """Return the reward, and the reply that it is loaded or why it is not."""
    _limit_memory(setup["memory"])
    make_importable(Path(setup["folder"]))
    try:
        section = from_plain(RewardSection, setup["reward"])
        return function_of("reward", section.kind)(section), {"is_loaded": True}
    except TrainctlError as error:
        problem = error
    except (Exception, SystemExit) as error:
        problem = TrainctlError(in_words(error))
    text, code = problem.message[:_MOST_CHARACTERS], int(problem.exit_code)
    return None, {"error": text, "hint": problem.hint, "exit_code": code}


def _score(score: Score, asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"reward": _checked(score(asked["prompt"], asked["answer"], asked["columns"]))}
    except MemoryError:
        return {"failed": "takes more than objective.reward_memory"}
    except (Exception, SystemExit) as error:
        return {"failed": in_words(error)[:_MOST_CHARACTERS]}


def _limit_memory(most_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _checked(value: Any) -> float | None:
    """Return a reward as a float.

    Raises:
        ValueError: It is no finite number.
    """
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"returned {value!r:.80}, which is no finite number")
    return number
