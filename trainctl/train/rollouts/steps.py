"""Steps on answers that the model samples: rollout, rewards, advantages, micro-batches.

A sample of the run is one answer: answer `c % samples` to prompt `c // samples` of the data order
has the counter c. A phase samples the answers of `objective.updates` steps with the weights before
the first of them. All that a step learns from is known on every rank before its first micro-batch,
and is the same on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trainctl.config.codec import to_plain
from trainctl.config.reading import read_json
from trainctl.data.corpora import corpus_digests
from trainctl.data.rewards import RewardProcesses, SampledAnswer, weighted_sum
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.objective.grpo import GrpoConfig, Rollout
from trainctl.plans.mixture import SINGLE_SOURCE, StagedBatches, stages_of_plan
from trainctl.plans.types import Batch
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.files import write_json
from trainctl.runs.rollouts import write_rollouts
from trainctl.runs.status import Phase
from trainctl.train.adapters.layers import without_adapters
from trainctl.train.callbacks.context import Journal
from trainctl.train.evaluation import HeldOutLoss, inference, prompts_of
from trainctl.train.objectives.grpo import Floats, advantages_of, divisors_of
from trainctl.train.rollouts import (
    AnswerKey,
    AnswerWriter,
    Completion,
    RolloutRow,
    Sampler,
    drop_phases,
    folder_name,
    read_answers,
)
from trainctl.train.rollouts.generate import Generation, generate
from trainctl.train.rollouts.server import RolloutServer, on_first_rank, weights_sums
from trainctl.train.session import Session

WIDTH_MULTIPLE = 16
"""Divisor of the padded length of rows, in tokens: kernels and tensor ranks like round lengths."""

HELD_OUT_NUMBER = 1 << 62
"""Number of the first held-out prompt; training prompts are numbered from 0."""

SAMPLING_KEYS = (
    "rollout",
    "samples",
    "max_prompt_tokens",
    "max_answer_tokens",
    "temperature",
    "top_p",
    "top_k",
    "rewards",
)
"""Keys of the objective that sampled answers and their rewards follow from."""

_PHASE_FILE = "phase.json"
_NUMBERS = ("step", "first_sample", "extra_samples", "global_batch_size", "without_signal")
"""Fields of a phase that its file has as they are."""


@dataclass(slots=True)
class JudgedAnswer:
    """A sampled answer with all that is computed of it before its step."""

    number: int
    """Number of its prompt."""
    sample: int
    """Number among the answers to its prompt."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    fields: dict[str, Any]
    """Fields that the run keeps: `ids`, `sampled`, `is_finished`, `rewards`, `old`, `reference`.

    Of the rewards, None does not apply, and NaN has failed.
    """
    reward: float = math.nan
    """Weighted sum of its rewards; NaN if none applies."""
    advantage: float = 0.0

    @property
    def key(self) -> AnswerKey:
        return self.number, self.sample

    @property
    def tokens(self) -> int:
        return len(self.fields["ids"])

    def has_failed(self, name: str) -> bool:
        """Return True if a reward has failed for this answer."""
        value = self.fields["rewards"][name]
        return value is not None and math.isnan(value)

    @property
    def known_reward(self) -> float:
        """Weighted sum of its rewards; NaN if none applies, or all that apply have failed."""
        values = self.fields["rewards"].values()
        is_known = any(value is not None and not math.isnan(value) for value in values)
        return self.reward if is_known else math.nan

    @classmethod
    def of(
        cls, section: GrpoConfig, key: AnswerKey, prompt: Sequence[int], fields: dict[str, Any]
    ) -> Self:
        """Return an answer with the sum of its rewards."""
        rewards = fields["rewards"]
        is_known = any(value is not None for value in rewards.values())
        reward = weighted_sum(section, rewards) if is_known else math.nan
        return cls(*key, tuple(prompt), fields, reward)


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """Answers of consecutive steps, from the weights before the first one."""

    folder: Path
    step: int
    """Steps of the run before the phase."""
    first_sample: int
    """Counter of its first sample."""
    extra_samples: int
    """Samples of the prompts that dynamic sampling has replaced."""
    global_batch_size: int
    without_signal: float
    """Share of its prompts, with the replaced ones, whose answers all had the same reward."""
    answers: list[JudgedAnswer]

    def offset(self, step: int, first_sample: int) -> int | None:
        """Return the index of a step's first answer; None if the phase is not of this step."""
        offset = (step - self.step) * self.global_batch_size
        begins = self.first_sample + offset + (self.extra_samples if step > self.step else 0)
        is_inside = 0 <= offset < len(self.answers) and first_sample == begins
        return offset if is_inside else None


class RolloutData:
    """Source of the micro-batches of steps that learn from sampled answers; a context manager.

    All ranks call its methods together.

    Attributes:
        extra_samples: Samples that the last step used up beyond its batch.
        measures: Numbers to record of the last step, by name.
        width: Tokens of each row of the last step, on all ranks.
    """

    def __init__(self, session: Session, journal: Journal) -> None:
        config = session.plan.config
        assert isinstance(config.objective, GrpoConfig)
        self._session, self._journal, self._section = session, journal, config.objective
        self._batches = StagedBatches(stages_of_plan(session.plan))
        ends = prompts_of(config.data, session.tokenizer).ends
        self._generation = Generation.of(session.plan, ends, session.tokenizer.vocab_size)
        self._server: RolloutServer | None = None
        if config.objective.rollout is Rollout.vllm:
            url, at_once = config.objective.rollout_url or "", self._generation.batch_size
            self._server = RolloutServer(url, session.process, at_once=at_once)
        self._phase: RolloutPhase | None = None
        self._rewards: RewardProcesses | None = None
        self.extra_samples = 0
        self.measures: dict[str, float] = {}
        self.width = 0
        self._idle_steps = 0
        self._reasons: dict[str, str] = {}

    @property
    def phase_name(self) -> str:
        """Name of the folder of the last step's phase, for a checkpoint's manifest."""
        return self._phase.folder.name if self._phase is not None else ""

    def __enter__(self) -> Self:
        problem = None
        if self._session.process.is_first:
            try:
                self._rewards = RewardProcesses(self._section, self._journal.record)
            except TrainctlError as error:
                problem = error
        problem = self._session.process.broadcast_from_first(problem)
        if problem is not None:
            raise problem
        return self

    def __exit__(self, *exception: object) -> None:
        if self._rewards is not None:
            self._rewards.close()

    def take(self, step: int, first_sample: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the step after `step` steps.

        Args:
            first_sample: Counter of the next sample.
        """
        batch = self._batches.at(step, first_sample)[1]
        phase = self._phase or self._kept_phase()
        offset = None if phase is None else phase.offset(step, first_sample)
        if phase is None or offset is None:
            phase, offset = self._sample(step, first_sample, batch), 0
        self._phase = phase
        self.extra_samples = phase.extra_samples if step == phase.step else 0
        answers = phase.answers[offset : offset + batch.global_batch_size]
        self.measures = {**_measures(answers), "without_signal": phase.without_signal}
        self.width = self._width(answers)
        if self._session.process.is_first:
            self._keep_texts(step + 1, answers[: self._section.keep_rollouts])
        self._require_signal(step + 1, answers)
        return self._micro_batches(answers, batch)

    def _require_signal(self, step: int, answers: Sequence[JudgedAnswer]) -> None:
        """Count the steps in a row that have nothing to learn from.

        Raises:
            TrainctlError: They are `objective.no_signal_steps` (exit code 6).
        """
        size = self._section.samples
        groups = [answers[at : at + size] for at in range(0, len(answers), size)]
        failed = [name for name in self._section.rewards if _has_failed(name, answers)]
        self._idle_steps += 1
        if not failed and any(map(_has_signal, groups)):
            self._idle_steps = 0
        if self._idle_steps != self._section.no_signal_steps:
            return
        what = "all answers to each prompt had the same reward"
        if failed:
            reason = self._reasons.get(failed[0], "")
            what = f"the reward {failed[0]} failed for every answer" + f": {reason}" * bool(reason)
        shown = f"`trainctl data show {self._session.run.root} --step {step}`"
        raise TrainctlError(
            f"nothing to learn from in {self._idle_steps} steps in a row: {what}",
            hint=f"{shown} has the answers; "
            + ("correct the function" if failed else "give prompts or rewards that tell them apart")
            + ", or objective.no_signal_steps=null",
            exit_code=ExitCode.training_failed,
        )

    def _keep_texts(self, step: int, answers: Sequence[JudgedAnswer]) -> None:
        """Write answers as text, for people to look at; a full disk does not end the run."""
        rows = [
            {
                "number": each.number,
                "sample": each.sample,
                "prompt": self._session.tokenizer.decode(each.prompt, with_special=True),
                "answer": self._answer_text(each.fields),
                "tokens": each.tokens,
                "is_finished": each.fields["is_finished"],
                "rewards": each.fields["rewards"],
                "failed": [name for name in each.fields["rewards"] if each.has_failed(name)],
                "reward": each.known_reward,
                "advantage": each.advantage,
            }
            for each in answers
        ]
        if rows:
            with suppress(OSError):
                write_rollouts(self._session.run, step, rows)

    def _answer_text(self, fields: Mapping[str, Any]) -> str:
        """Return the text of an answer, without the token that ends it."""
        ids = fields["ids"].tolist()
        return self._session.tokenizer.decode(ids[:-1] if fields["is_finished"] else ids)

    def check(self, measures: Mapping[str, float]) -> None:
        """Compare the rollout's log-probabilities with the trainer's, before the update.

        Args:
            measures: Measures of the step's objective.

        Raises:
            TrainctlError: They differ by more than `objective.mismatch_limit` (exit code 6).
        """
        found, limit = measures["mismatch"], self._section.mismatch_limit
        if found > limit:
            raise TrainctlError(
                f"log-probabilities of rollout and trainer differ by {found:.3g} nats a token, "
                f"more than objective.mismatch_limit={limit:g}",
                hint=f"the weights were not updated; {self._likely_cause(found)}",
                exit_code=ExitCode.training_failed,
            )

    def _likely_cause(self, found: float) -> str:
        """Return the most likely cause of a mismatch, in nats a token."""
        config = self._session.plan.config
        if self._section.rollout is Rollout.vllm and found > 1.0:
            return "the server may have another model, tokenizer or chat template"
        if self._section.rollout is Rollout.vllm:
            return "the server may have stale weights, or another precision than the run"
        return (
            f"precision.compute={config.precision.compute} rounds differently in sampling and "
            "training, or the model has dropout: try precision=fp32 for a step to tell them apart"
        )

    def _sample(self, step: int, first_sample: int, batch: Batch) -> RolloutPhase:
        """Sample, judge and score the answers of a phase, reusing those that the run has kept."""
        section, run = self._section, self._session.run
        folder = run.rollouts / folder_name(step, self._identity(first_sample))
        process = self._session.process
        if process.is_first:
            saved = [info.step for info in list_checkpoints(run)]
            drop_phases(run.rollouts, folder, before=max(saved, default=0) - section.updates)
        known = process.broadcast_from_first(read_answers(folder) if process.is_first else None)
        writer = AnswerWriter(folder, process.rank)
        count = section.updates * batch.global_batch_size // section.samples
        first = cursor = first_sample // section.samples
        chosen: list[list[JudgedAnswer]] = []
        flat: list[list[JudgedAnswer]] = []
        for _ in range(section.dynamic_sampling + 1):
            numbers = range(cursor, cursor + count - len(chosen))
            cursor = numbers.stop
            prompts = {number: self._session.training.prompt(number) for number in numbers}
            for group in self._answered(prompts, section.samples, known, writer, step):
                (chosen if _has_signal(group) else flat).append(group)
        without_signal = len(flat) / (cursor - first)
        groups = sorted([*chosen, *flat][:count], key=lambda group: group[0].number)
        rewards = np.array([[each.reward for each in group] for group in groups], np.float32)
        answers = [each for group in groups for each in group]
        for each, advantage in zip(answers, advantages_of(section, rewards).flat, strict=True):
            each.advantage = float(advantage)
        phase = RolloutPhase(
            folder=folder,
            step=step,
            first_sample=first_sample,
            extra_samples=(cursor - first - count) * section.samples,
            global_batch_size=batch.global_batch_size,
            without_signal=without_signal,
            answers=answers,
        )
        module = self._session.engine.module
        with inference(module):
            if section.updates > 1:
                self._score(answers, "old", batch, writer)
            if section.kl_weight:
                with without_adapters(module):
                    self._score(answers, "reference", batch, writer)
        writer.close()
        if process.is_first:
            write_json(folder / _PHASE_FILE, _as_plain(phase))
        self._journal.beat(Phase.step)
        return phase

    def _identity(self, first_sample: int) -> dict[str, Any]:
        """Return what the answers of a phase follow from: weights, prompts and settings."""
        session, plan = self._session, self._session.plan
        section = to_plain(self._section)
        return {
            "weights": weights_sums(session),
            "first_sample": first_sample,
            "seed": plan.config.training.seed,
            "objective": {name: section[name] for name in SAMPLING_KEYS},
            **corpus_digests(session.corpora),
        }

    def _kept_phase(self) -> RolloutPhase | None:
        """Return the phase that a checkpoint was saved in; None if the run does not have it."""
        session = self._session
        found: RolloutPhase | None = None
        name = session.manifest.get("rollouts", "")
        folder = session.run.rollouts / name
        if session.process.is_first and name:
            with suppress(OSError, ValueError, KeyError, TypeError):
                plain = read_json(folder / _PHASE_FILE)
                known = read_answers(folder)
                prompts, keys = plain["prompts"], map(tuple, plain["answers"])
                answers = [
                    JudgedAnswer.of(self._section, key, prompts[str(key[0])], known[key])
                    for key in keys
                ]
                for each, advantage in zip(answers, plain["advantages"], strict=True):
                    each.advantage = advantage
                found = RolloutPhase(folder=folder, answers=answers, **plain["numbers"])
        return session.process.broadcast_from_first(found)

    def _answered(
        self,
        prompts: Mapping[int, Any],
        samples: int,
        known: dict[AnswerKey, dict[str, Any]],
        writer: AnswerWriter | None,
        step: int,
        beat: Callable[[str], None] | None = None,
    ) -> list[list[JudgedAnswer]]:
        """Return the answers to some prompts, `samples` to each, with their rewards."""
        beat = beat or partial(self._journal.beat, Phase.evaluate)
        keys = [(number, sample) for number in prompts for sample in range(samples)]
        missing = [key for key in keys if "ids" not in known.get(key, {})]
        rows = [RolloutRow(prompts[number].ids, number, sample) for number, sample in missing]
        for key, fields in zip(missing, self._generate(rows, writer, beat), strict=True):
            known.setdefault(key, {}).update(fields)
        unjudged = [key for key in keys if "rewards" not in known[key]]
        self._judge(unjudged, prompts, known, writer, step, beat)
        found = [JudgedAnswer.of(self._section, k, prompts[k[0]].ids, known[k]) for k in keys]
        return [found[at : at + samples] for at in range(0, len(found), samples)]

    def _generate(
        self,
        rows: Sequence[RolloutRow],
        writer: AnswerWriter | None,
        beat: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        """Sample the answers of all rows; each is kept when it is finished."""
        if not rows:
            return []
        session, section = self._session, self._section

        def keep(row: RolloutRow, answer: Completion) -> None:
            if writer is not None and session.mesh.tensor.is_first:
                writer.add((row.number, row.sample), **_fields(answer))

        sampler = Sampler(
            session.plan.config.training.seed, section.temperature, section.top_p, section.top_k
        )
        how = rows, sampler, self._generation, keep, beat
        with session.engine.times.plain_part("rollout"):
            if self._server is None:
                found = generate(session.engine, session.process, *how)
            else:
                self._server.send_weights(session, beat)
                found = self._server.generate(*how)
        return [_fields(each) for each in found]

    def _judge(
        self,
        keys: Sequence[AnswerKey],
        prompts: Mapping[int, Any],
        known: dict[AnswerKey, dict[str, Any]],
        writer: AnswerWriter | None,
        step: int,
        beat: Callable[[str], None],
    ) -> None:
        """Add the rewards of some answers, computed by the first rank."""
        if not keys:
            return

        def keep(place: int, rewards: dict[str, float | None]) -> None:
            if writer is not None:
                writer.add(keys[place], rewards=rewards)

        def score() -> tuple[list[dict[str, float | None]], dict[str, str]]:
            assert self._rewards is not None
            asked = []
            for key in keys:
                prompt, text = prompts[key[0]], self._answer_text(known[key])
                tokens = len(known[key]["ids"])
                asked.append(SampledAnswer(prompt.text, text, prompt.columns, tokens))
            return self._rewards.score(asked, step=step + 1, keep=keep), self._rewards.reasons

        doing = partial(beat, f"judging {len(keys):,} answers")
        with self._session.engine.times.host_part("reward"):
            scored, self._reasons = on_first_rank(self._session.process, score, doing)
        for key, rewards in zip(keys, scored, strict=True):
            known[key]["rewards"] = rewards

    def _score(
        self, answers: Sequence[JudgedAnswer], name: str, batch: Batch, writer: AnswerWriter
    ) -> None:
        """Add the log-probabilities of the answers under the model's weights as a field."""
        session, size = self._session, batch.micro_batch_size
        data, device = session.mesh.data, session.process.device
        width = self._width(answers)
        share = -(-len(answers) // (data.size * size)) * size
        own = range(data.index * share, (data.index + 1) * share)
        found: list[tuple[int, npt.NDArray[np.float32]]] = []
        for start in own[::size]:
            self._journal.beat(Phase.evaluate, f"log-probabilities ({name}) of the answers")
            places = [place for place in range(start, start + size) if place < len(answers)]
            rows = _rows([answers[place] for place in places], width, size)
            logits = session.engine.module(rows.model_inputs(device)).float()
            logs = torch.log_softmax(logits / self._section.temperature, dim=-1)
            labels = rows.labels.clamp(min=0).to(device)
            each = logs.gather(-1, labels[..., None])[..., 0].cpu().numpy()
            for row, place in enumerate(places):
                begin = len(answers[place].prompt) - 1
                found.append((place, each[row, begin : begin + answers[place].tokens]))
        if not session.mesh.tensor.is_first:
            found = []
        for place, values in found:
            writer.add(answers[place].key, **{name: values})
        for told in session.process.gather(found):
            for place, values in told:
                answers[place].fields[name] = values

    def _micro_batches(self, answers: Sequence[JudgedAnswer], batch: Batch) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step."""
        data, size = self._session.mesh.data, batch.micro_batch_size
        lengths = np.array([each.tokens for each in answers])
        divisors = divisors_of(self._section, lengths)
        dealt = np.arange(len(answers)).reshape(-1, data.size, size)[:, data.index]
        return [
            _rows([answers[place] for place in places], self.width, size, divisors[places], lengths)
            for places in dealt
        ]

    def _width(self, answers: Sequence[JudgedAnswer]) -> int:
        """Return the tokens of a row: enough for the longest answer of the step."""
        longest = max(len(each.prompt) + each.tokens for each in answers) - 1
        most = self._session.plan.batch.sequence_length
        return min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, max(most, longest))

    def evaluate(
        self, num_samples: int, beat: Callable[[str], None] | None = None
    ) -> HeldOutLoss | None:
        """Sample an answer to each of the first held-out prompts; return the mean of their rewards.

        The loss is the negative mean reward, so that a lower one is better. None without prompts,
        or if no reward applies to any answer.

        Args:
            beat: Called on all ranks every few seconds with what is being done; its error ends the
                evaluation.
        """
        session, source = self._session, SINGLE_SOURCE
        count = min(num_samples, session.held_out[source].num_samples)
        if count == 0:
            return None
        prompts = {
            HELD_OUT_NUMBER + index: session.held_out[source].prompt(index)
            for index in range(count)
        }
        groups = self._answered(prompts, 1, {}, None, session.progress.step, beat)
        measures = _measures([answer for (answer,) in groups])
        if "reward" not in measures:
            return None
        loss = -measures["reward"]
        return HeldOutLoss(loss, {source: loss}, count, measures)


def _rows(
    answers: Sequence[JudgedAnswer],
    width: int,
    size: int,
    divisors: Floats | None = None,
    lengths: npt.NDArray[np.int64] | None = None,
) -> MicroBatch:
    """Build a micro-batch: a row for each answer, after its prompt; padding below and behind.

    Args:
        divisors: Divisors of the answers' losses; None if no loss is computed.
        lengths: Tokens of all answers of the step, with `divisors`.
    """
    tokens = np.zeros((size, width + 1), np.int64)
    labels = np.full((size, width), IGNORED_LABEL, np.int64)
    of_tokens: dict[str, Floats] = {
        name: np.zeros((size, width), np.float32)
        for name in ("sampled", "old", "reference")
        if divisors is not None and answers and name in answers[0].fields
    }
    for row, each in enumerate(answers):
        begin = len(each.prompt)
        end = begin + each.tokens
        tokens[row, :end] = [*each.prompt, *each.fields["ids"]]
        labels[row, begin - 1 : end - 1] = each.fields["ids"]
        for name, values in of_tokens.items():
            values[row, begin - 1 : end - 1] = each.fields[name]
    stored: dict[str, torch.Tensor] = {
        name: torch.from_numpy(values) for name, values in of_tokens.items()
    }
    if divisors is not None and lengths is not None:
        stored |= {
            "advantages": torch.tensor([each.advantage for each in answers]),
            "divisors": torch.from_numpy(divisors),
            "mean_tokens": torch.full((size,), float(lengths.mean())),
        }
    inputs = torch.from_numpy(tokens[:, :-1].copy())
    return MicroBatch(
        input_ids=inputs,
        labels=torch.from_numpy(labels),
        position_ids=torch.arange(width).repeat(size, 1),
        document_ids=torch.zeros_like(inputs),
        sample_ids=torch.tensor([each.number for each in answers]),
        counts_records=True,
        stored=stored,
    )


def _fields(completion: Completion) -> dict[str, Any]:
    """Return the fields of a sampled answer, as the run keeps them."""
    return {
        "ids": completion.ids,
        "sampled": completion.log_probabilities,
        "is_finished": completion.is_finished,
    }


def _has_signal(group: Sequence[JudgedAnswer]) -> bool:
    """Return True if the answers to a prompt differ in their rewards."""
    return len({each.reward for each in group if not math.isnan(each.reward)}) > 1


def _has_failed(name: str, answers: Sequence[JudgedAnswer]) -> bool:
    """Return True if a reward has failed for every answer that it applies to."""
    found = {each.has_failed(name) for each in answers if each.fields["rewards"][name] is not None}
    return found == {True}


def _measures(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    """Return the numbers to record of some answers: rewards, length, share cut."""
    rewards = np.array([each.known_reward for each in answers])
    found = {"reward": rewards, "answer_tokens": np.array([each.tokens for each in answers])}
    for name in answers[0].fields["rewards"]:
        each_reward = [each.fields["rewards"][name] for each in answers]
        found[f"reward_{name}"] = np.array(each_reward, dtype=np.float64)  # None is NaN
    failed = [any(map(each.has_failed, each.fields["rewards"])) for each in answers]
    measures: dict[str, float] = {}
    for name, values in found.items():
        known = values[~np.isnan(values)]
        if len(known):
            measures[name] = float(known.mean())
            if name != "answer_tokens":
                measures[f"{name}_std"] = float(known.std())
    cut = [not each.fields["is_finished"] for each in answers]
    return {**measures, "cut": sum(cut) / len(cut), "failed": sum(failed) / len(failed)}


def _as_plain(phase: RolloutPhase) -> dict[str, Any]:
    """Return a phase without the fields that its answers keep, as JSON."""
    return {
        "numbers": {name: getattr(phase, name) for name in _NUMBERS},
        "prompts": {each.number: list(each.prompt) for each in phase.answers},
        "answers": [each.key for each in phase.answers],
        "advantages": [each.advantage for each in phase.answers],
    }
