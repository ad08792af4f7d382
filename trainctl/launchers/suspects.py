"""Suspects of a spike: the documents of a step's batch without which the spike is not there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from trainctl.config.compose import ComposedConfig
from trainctl.config.reading import read_json
from trainctl.config.schema import RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.launchers.replay import (
    ReplayResult,
    Replays,
    Say,
    announce_replay,
    checkpoint_before,
    plan_step,
    write_result,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Event, events_from_end, number, steps_from_end
from trainctl.runs.replays import SearchSettings

QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}
"""Quantities with spikes, and their names in messages."""
WINDOW = 32
"""Steps before the spike through which the line of usual values goes."""
LEAST_STEPS = 4
SPIKE = 3.0
"""Standard deviations above the line from which a value is a spike, by the median absolute
deviation (1.4826 of which are a standard deviation of normal numbers).
"""


@dataclass(frozen=True, slots=True)
class Spike:
    """A value of a step that stands out from those of the steps before."""

    by: str
    """`loss` or `grad_norm`."""
    value: float
    usual: float
    """Value at the step on the line through the steps before."""
    deviations: float
    """Distance of the two, in standard deviations."""
    steps: int
    """Number of the steps before."""

    def __str__(self) -> str:
        return (
            f"{QUANTITIES[self.by]} {self.value:.6g}, by the trend of the {self.steps} steps "
            f"before: {self.usual:.6g}"
        )


@dataclass(frozen=True, slots=True)
class SuspectDocument:
    """A document that carries a spike, or a part of it."""

    source: str
    document: int
    """Number of the document in the training split, from 0."""
    file: str | None
    line: int | None
    start: int
    """First token of the document that the batch has."""
    end: int
    sample: int
    """Counter of the sample that has it."""
    labels: int
    """Number of its tokens in the loss."""
    share: float | None
    """Share of the excess that is gone without it; None if the value is not finite."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects(ReplayResult):
    """Result of a search for documents."""

    run: str
    step: int
    by: str
    recorded: float
    """Value in the run's records."""
    usual: float
    replayed: float
    """Value of the whole batch in the replay."""
    left: float
    """Value without the documents."""
    is_reproduced: bool
    """Whether the replay has the spike."""
    documents: tuple[SuspectDocument, ...]
    units: int
    """Number of documents (of records: samples) that were searched."""
    replays: int
    """Number of times that the step was computed."""
    narrowest: tuple[int, int, int] | None
    """Fewest documents that were seen to carry more than half of the spike, with the counters of
    their first and last sample.
    """
    file: str = ""
    """The file with this result; empty if the run's directory cannot be written."""

    @property
    def is_good(self) -> bool:
        """Whether the spike is gone without the documents."""
        limit = (self.replayed - self.usual) / 2
        return bool(self.documents) and math.isfinite(self.left) and self.left - self.usual <= limit

    @property
    def sentence(self) -> str:
        """The result in words."""
        what = f"{QUANTITIES[self.by]} of step {self.step:,}"
        if not self.is_reproduced:
            return (
                f"the {what} is {self.replayed:.6g} in a replay and was {self.recorded:.6g}: no "
                f"document explains it (trainctl trial RUN --step {self.step})"
            )
        count = len(self.documents)
        names = "1 document carries" if count == 1 else f"{count} documents carry"
        tail = f"{self.left:.6g} without, {self.replayed:.6g} with ({self.replays} replays)"
        if self.is_good:
            return f"{names} the spike: the {what} is {tail}"
        few = f"{names} a part of the spike ({tail}), and no other one" if count else "no"
        narrow = ""
        if self.narrowest is not None and self.narrowest[0] < self.units:
            of, first, last = self.narrowest
            narrow = f"; more than half of it is in {of:,} documents (samples {first} to {last})"
        return (
            f"{few} document carries it alone: the {what} is {self.replayed:.6g} by all of the "
            f"{self.units:,} documents together{narrow}. Look at optimizer.lr and the steps before"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON, with what the report lists of it."""
        verdict = "explained" if self.is_good else "not explained"
        listed = {"changes": [f"data suspects --step {self.step}"], "versions": {}}
        return {**ReplayResult.to_dict(self), **listed, "verdict": verdict}


def find_suspects(
    run: RunPaths,
    configure: Callable[[RunConfig], ComposedConfig],
    *,
    step: int,
    by: str | None,
    most: int,
    force: bool,
    say: Say,
) -> Suspects:
    """Replay a step with halves of its batch left out; name the documents that carry its spike.

    Args:
        configure: Makes the configuration of the replay from the run's.
        by: `loss` or `grad_norm`; None takes the one that stands out more.
        most: Maximum number of documents.
        force: Whether to search where a value stands out little.

    Raises:
        TrainctlError: The records have no spike there; its samples cannot be told apart; or the
            replay failed.
    """
    plan = plan_step(configure(config_of(run)), run, step)
    spike = spike_of(run, step, by, force=force)
    say(str(spike))
    checkpoint = checkpoint_before(run, step)
    is_finite = math.isfinite(spike.value)
    settings = SearchSettings(
        by=spike.by,
        usual=spike.usual,
        least=(spike.value - spike.usual) / 2 if is_finite else None,
        most=most,
    )
    with Replays(run, checkpoint) as replays:
        say(f"{announce_replay(checkpoint, step)} with halves of its batch left out")
        copy = replays.launch("of parts of a batch", plan, settings, stop_step=step - 1)
        found = read_json(copy.recording / "found.json")
    narrow = found["narrowest"]
    result = Suspects(
        run=str(run.root),
        step=step,
        checkpoint=0 if checkpoint is None else checkpoint.step,
        by=spike.by,
        recorded=spike.value,
        usual=spike.usual,
        replayed=number(found["value"]),
        left=number(found["left"]),
        is_reproduced=found["is_there"],
        documents=tuple(_describe(run, plan, found["documents"])),
        units=found["units"],
        replays=found["replays"],
        narrowest=(found["narrowest_units"], *narrow) if narrow else None,
    )
    return replace(result, file=write_result(run, result.to_dict()))


def spike_of(run: RunPaths, step: int, by: str | None, *, force: bool = False) -> Spike:
    """Return what stands out of a step in the run's records.

    The value is that of the first intervention at the step, if there was one.

    Raises:
        TrainctlError: There is no record of the step or of those before (exit code 5), or nothing
            stands out.
    """
    curve = steps_from_end(run.events, range(max(1, step - WINDOW), step + 1))
    here = curve.pop(step, None)
    values: dict[str, Any] = {name: here.get(name) for name in QUANTITIES} if here else {}
    bad = _intervention(run, step)
    if bad is not None:
        values = {"loss" if bad["kind"].startswith("loss") else "grad_norm": bad["value"]}
    before = [each for each in curve.values() if not each.get("intervention")]
    found = [
        _spike(name, value, before, step) for name, value in values.items() if value is not None
    ]
    spikes = [each for each in found if each is not None and by in (None, each.by)]
    if not spikes:
        known = ", ".join(QUANTITIES[each.by] for each in found if each is not None)
        raise RunStateError(
            f"the run's records have no {QUANTITIES.get(by or '', 'value')} of step {step:,} "
            f"to compare with at least {LEAST_STEPS} steps before",
            hint=f"they have: {known}" if known else "a later step",
        )
    spike = max(spikes, key=lambda each: each.deviations)
    if spike.deviations < SPIKE and not (force and spike.deviations > 0):
        goes_on = "--force searches all the same, " if spike.deviations > 0 else ""
        raise TrainctlError(
            f"step {step:,} is no spike: {spike}, {spike.deviations:.1f} standard deviations",
            hint=f"{goes_on}--by loss or --by grad_norm; trainctl report RUN shows the curve",
        )
    return spike


def _intervention(run: RunPaths, step: int) -> Event | None:
    """Return the first `intervention` record of a step in its last attempt."""
    found = [each for each in events_from_end(run.events, "intervention") if each["step"] == step]
    return next((e for e in reversed(found) if e["attempt"] == found[0]["attempt"]), None)


def _spike(by: str, value: Any, before: Sequence[Event], step: int) -> Spike | None:
    """Compare a value with the line through those before by the median slope (Theil, 1950; Sen,
    1968): a loss that falls has no usual value, and one step in four may be a spike itself.
    """
    known = [(each["step"] - step, number(each[by])) for each in before if each.get(by) is not None]
    finite = [(at, each) for at, each in known if math.isfinite(each)]
    if len(finite) < LEAST_STEPS:
        return None
    here = number(value)
    slope = statistics.median((b - a) / (m - n) for (n, a), (m, b) in combinations(finite, 2))
    usual = statistics.median(each - slope * at for at, each in finite)
    spread = 1.4826 * statistics.median(abs(each - slope * at - usual) for at, each in finite)
    distance = (here - usual) / max(spread, 1e-12) if math.isfinite(here) else math.inf
    return Spike(by, here, usual, distance, len(finite))


def _describe(
    run: RunPaths, plan: RunPlan, found: Sequence[Mapping[str, Any]]
) -> Sequence[SuspectDocument]:
    from trainctl.data.prepare import load_run_corpora
    from trainctl.data.sample_contents import read_samples
    from trainctl.data.tokenizer import load_tokenizer

    samples = read_samples(
        plan,
        load_run_corpora(plan, run),
        load_tokenizer(plan.config.tokenizer),
        [each["sample"] for each in found],
        most_characters=1,
    )
    documents = []
    for each, sample in zip(found, samples, strict=True):
        left = each["position"] or 0
        for passage in sample.passages:
            size = passage.end - passage.start
            if left < size:
                break
            left -= size
        documents.append(
            SuspectDocument(
                source=sample.source,
                **asdict(passage),
                **{name: each[name] for name in ("sample", "labels", "share", "text")},
            )
        )
    return documents
