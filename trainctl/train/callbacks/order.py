"""The callbacks of a run in the order of their calls, and the calls of their hooks."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainctl.config.registry import function_of, load_spec
from trainctl.config.sections import callbacks_of
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.data.user_functions import in_words
from trainctl.engines.process import Process
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.callbacks import Callback, Ranks
from trainctl.options.objective import objective_of
from trainctl.plans.types import RunPlan
from trainctl.runs.replays import (
    RecordingSettings,
    SearchSettings,
    TrialSettings,
    requested_replay,
)
from trainctl.train.callbacks.checkpoints import Checkpoints
from trainctl.train.callbacks.context import Journal, RankContext, StepState
from trainctl.train.callbacks.document_search import DocumentSearch
from trainctl.train.callbacks.evaluation import EarlyStopping, Evaluation, Plateau, Sampling
from trainctl.train.callbacks.profile import Profile
from trainctl.train.callbacks.recompilations import recompilations_of
from trainctl.train.callbacks.recorder import TensorRecorder
from trainctl.train.callbacks.steps import (
    Divergence,
    DivergenceRecords,
    Heartbeats,
    MemoryRecords,
    StepRecords,
)
from trainctl.train.callbacks.stragglers import StragglerRecords, Stragglers
from trainctl.train.callbacks.trial import DeviceTrial
from trainctl.train.session import Session

HOOK_PREFIXES = ("on_", "before_", "after_")


def callbacks_of_run(
    session: Session, now: StepState, journal: Journal
) -> tuple[Callbacks, Checkpoints]:
    """Build the callbacks of this rank; on all ranks together.

    Returns:
        All callbacks, and the one that saves.

    Raises:
        TrainctlError: A callback of the user's cannot be built.
    """
    config, process, times = session.plan.config, session.process, session.engine.times
    runner: Callbacks
    checkpoints = Checkpoints(session, now, journal, lambda: runner.states())
    vocab_size = config.model.vocab_size if objective_of(config.objective).is_entropy else None
    has_score = config.model.score_outputs is not None  # which gives no next token
    samples = 0 if has_score else config.training.sample_tokens
    profile = Profile(
        config.logging,
        journal,
        rank=process.rank,
        folder=session.run.attempt(journal.attempt).profile,
        device=process.device,
    )
    evaluation = Evaluation(
        session, now, journal, lambda: runner.call("on_evaluate"), checkpoints.save_unless_saved
    )
    quick: dict[str, Callback | None] = {
        "recompilations": recompilations_of(session, now, journal),
        "heartbeats": Heartbeats(journal),
        "steps": StepRecords(session, now, journal),
        "divergence": DivergenceRecords(Divergence(vocab_size), now, journal),
        "profile": profile if config.logging.profile_steps else None,
        "memory": MemoryRecords(session, journal),
        "checkpoints": checkpoints,
        "patience": EarlyStopping(config.training, now),
        "plateau": Plateau(session.learning_rate, journal),
    }
    long: dict[str, Callback | None] = {
        "evaluation": evaluation,
        "sampling": Sampling(session, now, journal) if samples else None,
    }
    stragglers = Stragglers(session.plan, process, session.checkpoint_read)
    recording = requested_replay(session.run, RecordingSettings)
    trial = requested_replay(session.run, TrialSettings)
    search = requested_replay(session.run, SearchSettings)
    after_users: dict[str, Callback | None] = {
        "recorder": TensorRecorder(session, recording) if recording is not None else None,
        "trial": DeviceTrial(session, trial) if trial is not None else None,
        "search": DocumentSearch(session, search) if search is not None else None,
        "stragglers": StragglerRecords(stragglers, times, now, journal),
    }
    entries = [
        *_own_callbacks(quick),
        *(replace(entry, is_long=True) for entry in _own_callbacks(long)),
        *_configured_callbacks(session.plan, process),
        *_own_callbacks(after_users),
    ]
    runner = Callbacks(entries, session, now, journal)
    return runner, checkpoints


def _own_callbacks(callbacks: Mapping[str, Callback | None]) -> Iterator[CallbackEntry]:
    """Yield trainctl's own callbacks, which run on all ranks and may use collectives."""
    for name, callback in callbacks.items():
        if callback is not None:
            yield CallbackEntry(name=name, callback=callback, ranks=Ranks.all, collectives=True)


def _configured_callbacks(plan: RunPlan, process: Process) -> Iterator[CallbackEntry]:
    """Yield the callbacks of the configuration that run on this rank."""
    for name, keys in callbacks_of(plan.config).items():
        spec = load_spec("callbacks", name)
        if spec.ranks is Ranks.first and not process.is_first:
            continue
        try:
            callback = function_of("callbacks", name)(keys)
        except TrainctlError:
            raise
        except Exception as error:
            raise TrainctlError(
                f"the callback {name} cannot be built: {in_words(error)}",
                hint=f"repair it, or leave {name} out of `callbacks`",
                exit_code=ExitCode.training_failed,
            ) from error
        _check_hooks(name, callback)
        declared = {"ranks": spec.ranks, "collectives": spec.collectives}
        yield CallbackEntry(name=name, callback=callback, is_users=True, is_long=True, **declared)


def _check_hooks(name: str, callback: object) -> None:
    """Refuse an object that is no callback, and methods that are hooks but for a typo."""
    if not isinstance(callback, Callback):
        raise TrainctlError(
            f"`build` of the callback {name} returned {type(callback).__name__}, which is no "
            "subclass of trainctl.options.callbacks.Callback",
        )
    for method in dir(type(callback)):
        is_hook = method.startswith(HOOK_PREFIXES) and callable(getattr(callback, method, None))
        if is_hook and not hasattr(Callback, method):
            close = nearest_names(method, [hook for hook in dir(Callback) if hook[0] != "_"])
            raise TrainctlError(
                f"the callback {name} has a method {method}, and there is no such hook",
                hint=did_you_mean(close) or f"other methods do not begin with {HOOK_PREFIXES}",
            )


LONG_HOOKS = ("after_step", "after_agreement", "on_train_end")
"""Hooks after a step. Those of long callbacks wait for the step's checkpoint, which names them
until they have run, so that a resume runs what was left.
"""

CONTEXT_HOOKS = (
    "on_train_start",
    "before_step",
    "after_backward",
    "after_step",
    "on_evaluate",
    "on_train_end",
)
"""Hooks that get the context alone."""

STATES = "callbacks"
"""Entry of a checkpoint's manifest with the states of users' callbacks, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackEntry:
    """A callback with its declaration."""

    name: str
    callback: Callback
    ranks: Ranks = Ranks.all
    collectives: bool = False
    is_users: bool = False
    """Whether it comes from `callbacks` of the configuration."""
    is_long: bool = False
    """Whether its `LONG_HOOKS` may take long."""

    def is_due(self, hook: str, *, step: int, is_last: bool) -> bool:
        """Return True if a hook of `LONG_HOOKS` has something to do after a step."""
        if hook == "after_step" and isinstance(self.callback, Evaluation):
            return self.callback.is_due(step)
        return is_last or hook != "on_train_end"


class Callbacks:
    """The callbacks of this rank. A hook that no callback overrides is an empty list.

    Args:
        entries: Callbacks that run on this rank, in the order of their calls.
    """

    def __init__(
        self, entries: Sequence[CallbackEntry], session: Session, now: StepState, journal: Journal
    ) -> None:
        self._entries, self._now, self._times = entries, now, session.engine.times
        self._session, self._process = session, session.process
        self._counts: dict[str, int] = {}
        self._contexts = [
            RankContext(
                each.name,
                session,
                now,
                journal,
                collectives=each.collectives,
                is_alone=each.ranks is Ranks.first,
            )
            for each in entries
        ]
        self._hooks = {
            hook: [
                partial(self._run, entry, hook, context)
                for entry, context in zip(entries, self._contexts, strict=True)
                if _overrides(entry.callback, hook) and not (entry.is_long and hook in LONG_HOOKS)
            ]
            for hook in CONTEXT_HOOKS
        }
        self._long = [
            (entry, hook, context)
            for entry, context in zip(entries, self._contexts, strict=True)
            for hook in LONG_HOOKS
            if entry.is_long and _overrides(entry.callback, hook)
        ]
        self._agreeing = [
            (entry, context)
            for entry, context in zip(entries, self._contexts, strict=True)
            if _overrides(entry.callback, "before_agreement")
            or _overrides(entry.callback, "after_agreement")
        ]
        for entry, _ in self._agreeing:
            if entry.ranks is Ranks.first and _overrides(entry.callback, "before_agreement"):
                raise TrainctlError(
                    f"the callback {entry.name} runs on the first rank alone, and "
                    "before_agreement sums over all ranks",
                    hint="CallbackSpec(..., ranks=Ranks.all)",
                )

    def call(self, hook: str) -> None:
        """Call a hook of `CONTEXT_HOOKS` on all callbacks that override it.

        Of `LONG_HOOKS`, long callbacks have theirs by `call_long`.
        """
        for run in self._hooks[hook]:
            run()

    def has_long_hooks(self, step: int) -> bool:
        """Return True, on all ranks alike, if long work may follow a step."""
        return bool(callbacks_of(self._session.plan.config)) or any(
            hook == "after_step" and entry.is_due(hook, step=step, is_last=False)
            for entry, hook, _ in self._long
        )

    def long_hooks(self, step: int) -> set[tuple[str, str]]:
        """Return the long hooks of this rank that have something to do after a step."""
        is_last = step == self._session.plan.stop_step
        return {
            (entry.name, hook)
            for entry, hook, _ in self._long
            if entry.is_due(hook, step=step, is_last=is_last)
        }

    @property
    def all_long_hooks(self) -> set[tuple[str, str]]:
        """Long hooks of this rank, whether or not a step has them."""
        return {(entry.name, hook) for entry, hook, _ in self._long}

    def call_long(self, hook: str) -> None:
        """Call a hook of the long callbacks; after a step, only of those that have not had it."""
        for entry, its_hook, context in self._long:
            if its_hook == hook and (hook == "on_train_end" or self._is_left(entry, hook)):
                self._run_long(entry, hook, context, context)

    def _is_left(self, entry: CallbackEntry, hook: str) -> bool:
        return (entry.name, hook) in self._now.unfinished

    def _run_long(
        self, entry: CallbackEntry, hook: str, context: RankContext, *arguments: Any
    ) -> None:
        """Run a long hook; it stays unfinished if it was told to return early, as does the end of
        a run that was asked to stop.
        """
        context.was_stopped = False
        self._run(entry, hook, *arguments)
        if not context.was_stopped and (self._now.is_done or hook != "on_train_end"):
            self._now.unfinished.discard((entry.name, hook))

    def before_agreement(self) -> list[list[float]]:
        """Return the numbers of each callback that takes part, to be summed over the ranks."""
        found = []
        for entry, context in self._agreeing:
            with self._watched(entry, "before_agreement"):
                found.append([float(each) for each in entry.callback.before_agreement(context)])
        counts = {
            entry.name: len(numbers)
            for (entry, _), numbers in zip(self._agreeing, found, strict=True)
            if entry.is_users and _overrides(entry.callback, "before_agreement")
        }
        self._check_counts(counts)
        return found

    def _check_counts(self, counts: dict[str, int]) -> None:
        """Refuse numbers that other ranks, or this rank's first step, have more or fewer of.

        An all-reduce of different lengths aborts the process. All ranks compare the counts once;
        then each rank keeps to its own.

        Args:
            counts: Numbers of each user's callback that takes part, by name.
        """
        if counts == self._counts:
            return
        if not self._counts:
            for rank, others in enumerate(self._process.gather(counts)):
                for name, count in others.items():
                    if count != counts[name]:
                        ranks = (self._process.rank, counts[name]), (rank, count)
                        raise self._count_error(
                            name, " and ".join(f"{n} on rank {r}" for r, n in sorted(ranks))
                        )
            self._counts = counts
        for name, count in counts.items():
            if count != self._counts[name]:
                raise self._count_error(
                    name, f"{count} at step {self._now.step}, after {self._counts[name]} before"
                )

    def _count_error(self, name: str, counts: str) -> TrainctlError:
        callback = next(entry.callback for entry in self._entries if entry.name == name)
        return TrainctlError(
            f"the callback {name} returned different counts of numbers in before_agreement: "
            f"{counts}",
            hint=f"let {file_of(callback)} return as many on all ranks in every step, such as 0.0 "
            "where there is nothing to sum",
            exit_code=ExitCode.training_failed,
        )

    def after_agreement(self, sums: Sequence[Sequence[float]]) -> None:
        """Give each callback the sums of its numbers."""
        for (entry, context), own in zip(self._agreeing, sums, strict=True):
            if not entry.is_long:
                self._run(entry, "after_agreement", context, own)
            elif self._is_left(entry, "after_agreement"):
                self._run_long(entry, "after_agreement", context, context, own)

    def states(self) -> dict[str, Any]:
        """Return the manifest entries of all callbacks: trainctl's own ones by their names."""
        found: dict[str, Any] = {}
        for entry in self._entries:
            if not _overrides(entry.callback, "before_save"):
                continue
            with self._watched(entry, "before_save"):
                # As a resume will read it; the manifest's writer would fail without a name.
                state = json.loads(json.dumps(dict(entry.callback.before_save()), allow_nan=False))
            if entry.is_users:
                found.setdefault(STATES, {})[entry.name] = state
            else:
                found[entry.name] = state
        return found

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Restore the states in a manifest; callbacks without one get an empty state."""
        for entry in self._entries:
            if _overrides(entry.callback, "after_load"):
                states = manifest.get(STATES, {}) if entry.is_users else manifest
                self._run(entry, "after_load", states.get(entry.name, {}))

    def close(self) -> None:
        """Close all callbacks, the last one first, also those before one that fails."""
        with ExitStack() as stack:
            for entry in self._entries:
                if _overrides(entry.callback, "close"):
                    stack.callback(self._run, entry, "close")

    def _run(self, entry: CallbackEntry, hook: str, *arguments: Any) -> None:
        with self._watched(entry, hook):
            getattr(entry.callback, hook)(*arguments)

    @contextmanager
    def _watched(self, entry: CallbackEntry, hook: str) -> Iterator[None]:
        """Time the hook of a user's callback, and name the callback in its errors."""
        if not entry.is_users:
            yield
            return
        with self._times.plain_part(f"{STATES}/{entry.name}"):
            try:
                yield
            except TrainctlError:
                raise
            except Exception as error:
                # For the rank's log. Its last traceback at a margin would be the launch's message.
                print(textwrap.indent(traceback.format_exc(), "  "), file=sys.stderr)
                file = file_of(entry.callback)
                raise TrainctlError(
                    f"the callback {entry.name} failed in {hook} at step {self._now.step}: "
                    f"{in_words(error, file)}",
                    hint=f"repair {file}, or leave {entry.name} out of "
                    "`callbacks`; resume goes on from the last checkpoint",
                    exit_code=ExitCode.training_failed,
                ) from error


def file_of(callback: Callback) -> str:
    """Return the file that defines a callback's class."""
    try:
        return inspect.getfile(type(callback))
    except (TypeError, OSError):
        return type(callback).__module__


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)
