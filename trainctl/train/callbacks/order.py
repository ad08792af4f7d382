"""The callbacks of a run, in the order of their calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from trainctl.config.registry import function_of, load
from trainctl.config.suggest import did_you_mean, nearest
from trainctl.data.user_functions import in_words
from trainctl.engines.process import Process
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.callbacks import Callback, Ranks, callbacks_of
from trainctl.options.objective import objective_of
from trainctl.plan.types import RunPlan
from trainctl.train.callbacks.checkpoints import Checkpoints
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.callbacks.divergence import Divergence, DivergenceRecords
from trainctl.train.callbacks.evaluation import EarlyStopping, Evaluation, Plateau, Sampling
from trainctl.train.callbacks.memory import MemoryRecords
from trainctl.train.callbacks.profile import Profile, Profiler
from trainctl.train.callbacks.runner import CallbackEntry, Callbacks
from trainctl.train.callbacks.steps import Heartbeats, StepRecords
from trainctl.train.callbacks.stragglers import StragglerRecords, Stragglers
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
    config = session.plan.config
    runner: Callbacks

    def publish() -> None:
        runner.call("on_evaluate")

    def states() -> dict[str, Any]:
        return runner.states()

    entry = partial(CallbackEntry, ranks=Ranks.all, collectives=True)
    checkpoints = Checkpoints(session, now, journal, states)
    vocab_size = config.model.vocab_size if objective_of(config.objective).is_entropy else None
    profiler = Profiler(
        config.logging,
        rank=session.process.rank,
        folder=session.run.attempt(journal.attempt).profile,
        device=session.process.device,
    )
    runner = Callbacks(
        [
            entry(name="heartbeats", callback=Heartbeats(journal)),
            entry(name="steps", callback=StepRecords(session, now, journal)),
            entry(
                name="divergence",
                callback=DivergenceRecords(Divergence(vocab_size), now, journal),
            ),
            *(
                [entry(name="profile", callback=Profile(profiler, journal))]
                if config.logging.profile_steps
                else []
            ),
            entry(name="memory", callback=MemoryRecords(session, journal)),
            entry(name="evaluation", callback=Evaluation(session, now, journal, publish)),
            entry(name="patience", callback=EarlyStopping(config.training, now)),
            entry(name="plateau", callback=Plateau(session.learning_rate, journal)),
            *(
                [entry(name="sampling", callback=Sampling(session, now, journal))]
                if config.training.sample_tokens
                else []
            ),
            *_configured_callbacks(session.plan, session.process),
            entry(
                name="stragglers",
                callback=StragglerRecords(
                    Stragglers(session.plan, session.process), session.engine.times, now, journal
                ),
            ),
            entry(name="checkpoints", callback=checkpoints),
        ],
        session,
        now,
        journal,
    )
    return runner, checkpoints


def _configured_callbacks(plan: RunPlan, process: Process) -> Iterator[CallbackEntry]:
    """Yield the callbacks of the configuration that run on this rank."""
    for name, keys in callbacks_of(plan.config).items():
        spec = load("callbacks", name)
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
        yield CallbackEntry(name=name, callback=callback, is_users=True, **declared)


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
            close = nearest(method, [hook for hook in dir(Callback) if hook[0] != "_"])
            raise TrainctlError(
                f"the callback {name} has a method {method}, and there is no such hook",
                hint=did_you_mean(close) or f"other methods do not begin with {HOOK_PREFIXES}",
            )
