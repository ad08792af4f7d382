"""Data plan of a run: tokens, share and epochs of each source, before anything starts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from trainctl.config.schema import RunConfig, SourceConfig
from trainctl.data.order import OrderedSource, OrderedStage, SampleOrder
from trainctl.errors import Finding, Severity
from trainctl.options.objective.grpo import answers_per_prompt
from trainctl.plans.mixture import (
    DataStage,
    samples_in,
    shares_of_quotas,
    sources_of,
    stages_of_plan,
    token_quota,
)
from trainctl.plans.types import RunPlan

ROUNDING = 1e-3
"""Relative tolerance on a source's epochs: rounding weights to a period may add this much."""

MOST_EPOCHS = 50
"""Epochs of a source above which a warning is given. Repeated text is worth nearly as much as
new text up to about four epochs (arXiv:2305.16264); small corpora are often repeated more.
"""

SHORT_SOURCE, INEXACT_AMOUNT, LEFT_OUT, REPEATED_SOURCE = "TC345", "TC346", "TC347", "TC411"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLength:
    """Length of a source."""

    tokens: int
    is_estimate: bool = False
    """Whether the length is estimated from file sizes because the files are not
    tokenized yet.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """Use of a source in one stage or in the whole run."""

    tokens: int
    samples: int
    share: float
    """Fraction of all tokens of the stage or run."""
    epochs: float
    unseen: int | None = None
    """Training tokens that no sample contains; None for a single stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """A stage with its steps, and the use of each source that it draws from."""

    first_step: int
    end_step: int
    first_sample: int
    samples: int
    tokens: int
    sequence_length: int
    global_batch_size: int
    sources: Mapping[str, SourceUse]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Use of each source, by stage and over the whole run."""

    stages: tuple[StageUse, ...]
    run: Mapping[str, SourceUse]
    """Use of each source over the whole run, including sources that are never drawn from."""
    counts: Mapping[str, SourceLength]
    problems: tuple[Finding, ...]
    """Findings on sources that are too short, or whose use differs from the request."""


def sample_order(plan: RunPlan, tokens: Mapping[str, int]) -> SampleOrder:
    """Return the sample order of a run, given the training tokens of each source.

    Raises:
        ValueError: A stage draws from a source shorter than one of its samples.
    """
    config, stages = plan.config, stages_of_plan(plan)
    sources = sources_of(config.data)
    amounts = config.data.sources
    shared = [stage for stage in stages if stage.weights is None]
    epoch_tokens = _tokens_of_epoch(tokens, shared[0].sequence_length) if shared else dict(tokens)
    of = sum(stage.tokens for stage in shared)
    whole = shares_of_quotas(amounts, epoch_tokens, of) if amounts else {}
    whole = whole or {name: Fraction(1) for name in sources}
    return SampleOrder(
        config.training.seed,
        [
            OrderedSource(name, tokens[name], getattr(section, "shuffle_shards", None))
            for name, section in sources.items()
        ],
        [
            OrderedStage(stage.first_sample, stage.sequence_length, stage.weights or whole)
            for stage in stages
        ],
        shuffle=config.data.shuffle,
    )


def plan_data(plan: RunPlan, counts: Mapping[str, SourceLength]) -> DataPlan:
    """Compute what a run uses of each source, and find the problems."""
    stages = stages_of_plan(plan)
    tokens = {name: count.tokens for name, count in counts.items()}
    too_short = list(_find_short_sources(plan.config, stages, tokens))
    if too_short:
        return DataPlan(stages=(), run={}, counts=counts, problems=tuple(too_short))
    order = sample_order(plan, tokens)
    repeats = answers_per_prompt(plan.config.objective)
    uses = tuple(_stage_use(order, stage, tokens, repeats) for stage in stages)
    everything = sum(stage.tokens for stage in uses)
    run: dict[str, SourceUse] = {}
    for name in tokens:
        mine = [stage.sources[name] for stage in uses if name in stage.sources]
        drawn, epochs = sum(use.tokens for use in mine), sum(use.epochs for use in mine)
        run[name] = SourceUse(
            tokens=drawn,
            samples=sum(use.samples for use in mine),
            share=drawn / everything if everything else 0.0,
            epochs=epochs,
            unseen=max(0, tokens[name] - drawn) if epochs < 1 else 0,
        )
    problems = (
        *_find_exceeded_epochs(plan.config, order, stages, run, tokens),
        *_find_repetition(plan.config, run, counts),
        *_find_wrong_amounts(plan.config, run, tokens, everything),
        *_find_skipped_tokens(plan.config, order),
    )
    return DataPlan(stages=uses, run=run, counts=counts, problems=problems)


def _tokens_of_epoch(tokens: Mapping[str, int], length: int) -> dict[str, int]:
    return {name: samples_in(count, length) * length for name, count in tokens.items()}


def _stage_use(
    order: SampleOrder, stage: DataStage, tokens: Mapping[str, int], repeats: int
) -> StageUse:
    """Return what a stage draws from each source, each sample `repeats` times."""
    length = stage.sequence_length
    before = order.draws_before(stage.first_sample)
    after = order.draws_before(stage.first_sample + stage.samples)
    drawn = {name: after[name] - before[name] for name in tokens}
    return StageUse(
        first_step=stage.first_step,
        end_step=stage.end_step,
        first_sample=stage.first_sample,
        samples=stage.samples,
        tokens=stage.tokens,
        sequence_length=length,
        global_batch_size=stage.batches.at(stage.first_step).global_batch_size,
        sources={
            name: SourceUse(
                tokens=samples * length,
                samples=samples,
                share=samples / stage.samples,
                epochs=samples / repeats / samples_in(tokens[name], length),
            )
            for name, samples in drawn.items()
            if samples
        },
    )


def _find_short_sources(
    config: RunConfig, stages: tuple[DataStage, ...], tokens: Mapping[str, int]
) -> list[Finding]:
    """Find sources shorter than one sample of a stage that draws from them."""
    found = []
    for name, section in sources_of(config.data).items():
        lengths = [
            stage.sequence_length
            for stage in stages
            if (name in stage.weights if stage.weights is not None else _has_share(section))
        ]
        if lengths and not samples_in(tokens[name], max(lengths)):
            found.append(
                Finding(
                    rule=SHORT_SOURCE,
                    key=_key_of_source(config, name),
                    message=f"{name} has {tokens[name]:,} tokens to train on: less than one sample "
                    f"of {max(lengths):,}",
                    hint="more text, a shorter sequence_length, or leave it out",
                )
            )
    return found


def _has_share(section: object) -> bool:
    if not isinstance(section, SourceConfig):
        return True
    return (section.weight or section.tokens or section.epochs) is not None


def _find_exceeded_epochs(
    config: RunConfig,
    order: SampleOrder,
    stages: tuple[DataStage, ...],
    run: Mapping[str, SourceUse],
    tokens: Mapping[str, int],
) -> list[Finding]:
    """Find sources that exceed `max_epochs`, with the missing tokens and the first such step."""
    found = []
    for name, source in config.data.sources.items():
        most = source.max_epochs
        if most is None or run[name].epochs <= most * (1 + ROUNDING):
            continue
        short = run[name].tokens - int(most * tokens[name])
        before = partial(_epochs_before, order, stages, name, tokens)
        step = bisect_left(range(stages[-1].end_step), most, key=before)
        found.append(
            Finding(
                rule=SHORT_SOURCE,
                key=f"data.sources.{name}.max_epochs",
                message=f"{name} falls short by {max(1, short):,} tokens: the run takes "
                f"{run[name].epochs:.3g} passes over its {tokens[name]:,}, and max_epochs is "
                f"{most:g}, which are over in step {step:,}",
                hint=f"a smaller weight, more text, or max_epochs={run[name].epochs:.4g}",
            )
        )
    return found


def _find_repetition(
    config: RunConfig, run: Mapping[str, SourceUse], counts: Mapping[str, SourceLength]
) -> Iterator[Finding]:
    """Find sources that are repeated too often, unless `max_epochs` allows it."""
    for name, use in run.items():
        allowed = getattr(config.data.sources.get(name), "max_epochs", None)
        if use.epochs > max(MOST_EPOCHS, allowed or 0):
            about = "about " if counts[name].is_estimate else ""
            what = name if config.data.sources else "the corpus"
            yield Finding(
                rule=REPEATED_SOURCE,
                key=f"{_key_of_source(config, name)}.kind",
                message=f"the run makes {use.epochs:,.0f} passes over {what}, which has {about}"
                f"{counts[name].tokens:,} tokens to train on",
                hint="more text, or a shorter run: training.tokens, training.steps or "
                "training.epochs",
                severity=Severity.warning,
            )


def _epochs_before(
    order: SampleOrder,
    stages: tuple[DataStage, ...],
    name: str,
    tokens: Mapping[str, int],
    step: int,
) -> float:
    epochs = 0.0
    for stage in stages:
        if step > stage.first_step:
            end = stage.sample_of(min(step, stage.end_step))
            drawn = order.draws_before(end)[name] - order.draws_before(stage.first_sample)[name]
            if drawn:
                epochs += drawn / samples_in(tokens[name], stage.sequence_length)
    return epochs


def _find_wrong_amounts(
    config: RunConfig, run: Mapping[str, SourceUse], tokens: Mapping[str, int], everything: int
) -> list[Finding]:
    """Find sources whose requested tokens or epochs differ from what the run draws."""
    found = []
    epoch_tokens = _tokens_of_epoch(tokens, config.training.sequence_length)
    for name, source in config.data.sources.items():
        wanted, drawn = token_quota(source, epoch_tokens[name]), run[name].tokens
        if source.weight is not None and not drawn:
            found.append(
                Finding(
                    rule=SHORT_SOURCE,
                    key=f"data.sources.{name}.weight",
                    message=f"nothing is left for {name}: {_explain_no_draws(config, everything)}",
                    hint="less of the others, or a longer run",
                )
            )
        length = config.training.sequence_length
        if wanted is None or abs(drawn - wanted) <= max(wanted / 100, Fraction(length)):
            continue
        unit = "tokens" if source.tokens is not None else "epochs"
        found.append(
            Finding(
                rule=INEXACT_AMOUNT,
                key=f"data.sources.{name}.{unit}",
                message=f"{name} is to give {int(wanted):,} tokens ({unit}="
                f"{getattr(source, unit):_}), and the run of {everything:,} takes {drawn:,} of it",
                hint="another training.tokens, or a weight in place of it",
                severity=Severity.warning,
            )
        )
    return found


def _explain_no_draws(config: RunConfig, everything: int) -> str:
    data = config.data
    if data.stages and all(stage.weights is not None for stage in data.stages):
        return "every stage has weights of its own, and not of it"
    if any(source.weight is None for source in data.sources.values()):
        return f"tokens and epochs of the other sources take all of the run's {everything:,} tokens"
    return f"its weight comes to less than one sample of the run's {everything:,} tokens"


def _find_skipped_tokens(config: RunConfig, order: SampleOrder) -> list[Finding]:
    """Find tokens that a change of sequence length leaves out of the current epoch."""
    return [
        Finding(
            rule=LEFT_OUT,
            key="data.stages",
            message=f"{left:,} tokens of {name} are left out of its present epoch where the "
            "sequence gets longer",
            hint="a shorter length that divides the one before cuts what is left anew"
            + (
                f"; data.sources.{name}.shuffle_shards=1 leaves less" if config.data.sources else ""
            ),
            severity=Severity.warning,
        )
        for name, left in order.skipped_tokens().items()
        if left
    ]


def _key_of_source(config: RunConfig, name: str) -> str:
    return f"data.sources.{name}" if config.data.sources else "data"
