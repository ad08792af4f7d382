"""Rules about sources, their mixture and its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from fractions import Fraction

from trainctl.config.codec import to_plain
from trainctl.config.keys import as_written
from trainctl.config.registry import section_class
from trainctl.config.schema import OnBadText, Packing, StageConfig
from trainctl.options.data import spec_of
from trainctl.options.data.stream import StreamConfig, shards_needed
from trainctl.options.precision import precision_of
from trainctl.options.tokenizer import spec_of as tokenizer_of
from trainctl.plans.derive import choices, divisors, is_counted_in_epochs, nearest_multiples
from trainctl.plans.mixture import (
    are_valid_weights,
    batch_of_length,
    batches_of_length,
    exact_fraction,
    keyed_sources,
    stage_end_step,
)
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule, warning_problem

AMOUNTS = ("weight", "tokens", "epochs")
ENDS = ("until", "until_step", "until_tokens")

SHARD_TOKENS = 1 << 26
"""Copy of the constant in `trainctl.data.source_sampler`, which needs numpy to be imported."""


_TWO_SOURCES_START = (
    "'data.sources={code: {kind: stdlib, weight: 0.7}, prose: {kind: files, paths: [a.txt]"
)
"""Start of an example with two sources."""

TWO_SOURCES = f"{_TWO_SOURCES_START}, weight: 0.3}}}}'"
TEXT = {"a.txt": "Some prose.\n" * 2000}


@rule(
    "TC340",
    "data.stages",
    "data.sources.*.*",
    "data.sources.*.weight",
    example=f"recipe=tiny {_TWO_SOURCES_START}, weight: 0.2}}}}'",
    files=TEXT,
)
def sources_have_their_share(draft: Draft) -> Iterator[Problem]:
    """Each data source has exactly one amount, and the weights of the sources sum to 1.

    Shares that do not add up to 1 hide a source that was forgotten or counted twice.

    Fix: Give shares with the sum 1, or whole numbers, which are taken in proportion; or epochs, or
    tokens, for each.
    """
    data, key = draft.config.data, "data.sources"
    if not data.sources:
        return
    later = {name for stage in data.stages for name in stage.weights or {}}
    for name, source in data.sources.items():
        given = [amount for amount in AMOUNTS if getattr(source, amount) is not None]
        if len(given) > 1:
            yield Problem(
                f"{key}.{name} has {' and '.join(given)}, which each say how much of it there is",
                f"leave all but one out, such as {key}.{name}.{given[0]}",
                key=f"{key}.{name}.{given[1]}",
            )
        elif not given and name not in later and (len(data.sources) > 1 or data.stages):
            yield Problem(
                f"{key}.{name} has no weight, tokens or epochs, and no stage names it: nothing "
                "would be drawn from it",
                f"{key}.{name}.weight=0.1, or leave the source out",
                key=f"{key}.{name}.weight",
            )
    weights = {n: s.weight for n, s in data.sources.items() if s.weight is not None}
    yield from _sum(key, ".weight", weights)
    if any(stage.weights is None for stage in data.stages) and not any(
        getattr(source, amount) for source in data.sources.values() for amount in AMOUNTS
    ):
        yield Problem(
            "a stage has no weights, and neither has any source",
            f"{key}.NAME.weight=1, or weights in each stage",
        )


@rule(
    "TC361",
    "*.max_bytes",
    "*.separator",
    "*.on_bad_text",
    example="recipe=tiny 'data.sources={code: {kind: tokens, weight: 0.7, paths: [a.bin], "
    "max_bytes: 9}, prose: {kind: files, paths: [a.txt], weight: 0.3}}'",
    files=TEXT,
)
def ids_are_no_text(draft: Draft) -> Iterator[Problem]:
    """Settings for text are not given to a source of token ids.

    Keys about text (its encoding, its length in bytes) say nothing of a source whose files have
    ids.

    Fix: Leave them out; name fewer files to use less.
    """
    data = draft.config.data
    for key, section in keyed_sources(data).items():
        if not spec_of(section).is_tokenized:
            continue
        kind = f"{key}.kind={section.kind}"
        if section.max_bytes is not None:
            yield Problem(
                f"{key}.max_bytes={section.max_bytes} is of text, and {kind} has ids, of which all "
                "are used",
                "leave it out, and name fewer files",
                key=f"{key}.max_bytes",
            )
        if section.separator:
            yield warning_problem(
                f"{key}.separator has no effect: {kind} has ids, and no text",
                key=f"{key}.separator",
            )
        if section.on_bad_text is not OnBadText.error:
            yield warning_problem(
                f"{key}.on_bad_text has no effect: {kind} has ids, and no text",
                key=f"{key}.on_bad_text",
            )


@rule(
    "TC362",
    "data.stages",
    "data.sources.*.shuffle_shards",
    example=f"recipe=tiny {TWO_SOURCES} 'data.stages=[{{until: 0.5, sequence_length: 128}}, {{}}]' "
    "data.packing=best_fit",
    files=TEXT,
)
def bins_have_one_length(draft: Draft) -> Iterator[Problem]:
    """Best-fit packing has one sample length and no shards.

    Best-fit packing fills bins of one length from a table of the whole corpus: stages cannot
    shorten them, and a stream of shards has no such table.

    Fix: Use data.packing=stream, or one length.
    """
    data, length = draft.config.data, draft.config.training.sequence_length
    if data.packing is Packing.stream:
        return
    for number, stage in enumerate(data.stages):
        if stage.sequence_length not in (None, length):
            yield Problem(
                f"data.stages[{number}]: sequence_length={stage.sequence_length} with data.packing="
                f"{data.packing.value}, whose bins are of training.sequence_length={length}",
                "data.packing=stream, or the same length in all stages",
            )
    for name, source in data.sources.items():
        if source.shuffle_shards is not None:
            yield Problem(
                f"data.sources.{name}.shuffle_shards={source.shuffle_shards} with data.packing="
                f"{data.packing.value}: a bin's documents are from anywhere in the source",
                "data.packing=stream",
                key=f"data.sources.{name}.shuffle_shards",
            )


@rule("TC363", "*.fim_tokens", "*.fim_rate", example="recipe=tiny data.fim_rate=0.5")
def infilling_has_its_tokens(draft: Draft) -> Iterator[Problem]:
    """Fill-in-the-middle has three tokens of the tokenizer.

    Infilling moves the middle of a document behind its end and marks the three parts by tokens of
    their own, which the tokenizer has to have.

    Fix: Use a tokenizer with such tokens in data.fim_tokens, or fim_rate=0.
    """
    data = draft.config.data
    for key, section in keyed_sources(data).items():
        if not section.fim_rate:
            continue
        if len(set(section.fim_tokens)) != 3 or len(section.fim_tokens) != 3:
            yield Problem(
                f"{key}.fim_tokens={section.fim_tokens} are not three tokens",
                "those of prefix, middle and suffix, in this order",
                key=f"{key}.fim_tokens",
            )
        if tokenizer_of(draft.config.tokenizer).file is None:
            yield Problem(
                f"{key}.fim_rate={section.fim_rate:g} needs tokens that announce prefix, middle "
                f"and suffix, and tokenizer.kind={draft.config.tokenizer.kind} has none",
                f"{key}.fim_rate=0, or a tokenizer with such tokens",
                key=f"{key}.fim_rate",
            )


@rule(
    "TC341",
    "training.epochs",
    "data.factory",
    "data.*",
    example=f"recipe=tiny {TWO_SOURCES} data.max_bytes=5",
    files=TEXT,
)
def run_of_sources_has_a_length(draft: Draft) -> Iterator[Problem]:
    """A mixture of sources has a length in steps or tokens, and no single-source keys.

    With several sources there is no one text to pass over, and the keys of a single source are not
    read.

    Fix: Set training.tokens for the whole, and epochs in each source.
    """
    config, data = draft.config, draft.config.data
    if not data.sources:
        return
    if is_counted_in_epochs(config.training):
        yield Problem(
            f"training.epochs={config.training.epochs:g} is of one text, and data.sources has "
            f"{len(data.sources)}",
            "training.tokens=NUMBER, with data.sources.NAME.epochs where a source is to be seen "
            "so often",
        )
    if data.factory is not None:
        yield Problem(
            f"data.factory={data.factory} and data.sources both say what is trained on",
            "leave one of the two out",
            key="data.factory",
        )
    default = to_plain(section_class("data", data.kind)())
    whole = {"kind", *(item.name for item in fields(data) if item.metadata["whole"])}
    for name, value in to_plain(data).items():
        if name not in whole and value != default[name]:
            yield warning_problem(
                f"data.{name} has no effect: data.sources has sections of its own",
                f"data.sources.NAME.{name}",
                key=f"data.{name}",
            )


@rule("TC365", "data.packing", "*.url", "*.cache_bytes", example="recipe=tiny data=stream")
def stream_has_its_place(draft: Draft) -> Iterator[Problem]:
    """A streamed corpus has an address, and a cache for the shards that are read at once.

    A streamed corpus needs an address, and its cache must hold the shards that are drawn from at
    once, and those that come next.

    Fix: Set data.url, and a larger cache_bytes or fewer shuffle_shards.
    """
    config, data = draft.config, draft.config.data
    for key, section in keyed_sources(data).items():
        if not isinstance(section, StreamConfig):
            continue
        if not section.url:
            yield Problem(
                f"{key}.kind=stream needs {key}.url", f"{key}.url=s3://...", key=f"{key}.url"
            )
        if data.packing is not Packing.stream:
            yield Problem(
                f"data.packing={data.packing.value} with {key}.kind=stream: a bin's documents are "
                "from anywhere in the source",
                "data.packing=stream",
            )
        shards = shards_needed(section.shuffle_shards, shuffle=data.shuffle)
        if section.shuffle_shards is None or shards is None or not data.shuffle:
            continue  # decided when the corpus and its length are known
        width = 2 if config.model.vocab_size <= 1 << 16 else 4
        needed = shards * SHARD_TOKENS * width
        if section.cache_bytes < needed:
            fits = section.cache_bytes // (2 * SHARD_TOKENS * width)
            fewer = f", or {key}.shuffle_shards={fits}" if fits else ""
            yield Problem(
                f"{key}.cache_bytes={section.cache_bytes} holds less than two windows of "
                f"{section.shuffle_shards} shards, the one that is read and the one that is "
                f"fetched: {needed} bytes of ids",
                f"{key}.cache_bytes={needed + needed // 16} has room for the ends of documents "
                f"too{fewer}",
                key=f"{key}.cache_bytes",
            )


@rule(
    "TC342",
    "data.stages",
    example=f"recipe=tiny {TWO_SOURCES} 'data.stages=[{{until: 0.5}}]'",
    files=TEXT,
)
def stages_follow_each_other(draft: Draft) -> Iterator[Problem]:
    """Each stage but the last has an end, in ascending order and within the run.

    Stages follow each other, each to a point of the run; the last goes to its end.

    Fix: Give until (a share), until_step or until_tokens in all stages but the last, ascending.
    """
    data, key = draft.config.data, "data.stages"
    last = 0
    for number, stage in enumerate(data.stages):
        where = f"{key}[{number}]"
        given = [name for name in ENDS if getattr(stage, name) is not None]
        is_last = number == len(data.stages) - 1
        if is_last and given:
            yield Problem(
                f"{where}: {_end(stage)}, and it is the last: it goes to the end of the run",
                f"leave {given[0]} out, or add a stage after it",
            )
        elif not is_last and len(given) != 1:
            yield Problem(
                f"{where} has {' and '.join(given) or 'no end'}, and is not the last",
                f"one of {', '.join(ENDS)}",
            )
        elif given and not _is_within(stage):
            yield Problem(
                f"{where}: {_end(stage)} is no point within the run",
                "until is a share above 0 and below 1; steps and tokens are above 0",
            )
        elif given and draft.batches is not None and draft.total_steps:
            end = stage_end_step(stage, draft.config.schedule, draft.batches, draft.total_steps)
            if end <= last:
                yield Problem(
                    f"{where}: {_end(stage)} is step {end}, and the stage before it ends with "
                    f"step {last}",
                    "each ends later than the one before, by a step at least",
                )
            elif end >= draft.total_steps:
                yield Problem(
                    f"{where}: {_end(stage)} is step {end}, and the run ends with step "
                    f"{draft.total_steps}: nothing is left for the stage after it",
                    "an earlier end, or a longer run",
                )
            last = max(last, end)


@rule(
    "TC343",
    "data.stages",
    example=f"recipe=tiny {TWO_SOURCES} 'data.stages=[{{until: 0.5}}, {{weights: {{cod: 1.0}}}}]'",
    files=TEXT,
)
def stages_know_their_sources(draft: Draft) -> Iterator[Problem]:
    """A stage's weights are positive, sum to 1, and name existing sources.

    A stage changes the weights of sources that exist; a name that none has would be ignored.

    Fix: Use names of data.sources, with weights above 0 that add up.
    """
    data = draft.config.data
    for number, stage in enumerate(data.stages):
        where = f"data.stages[{number}]"
        if stage.weights is None:
            continue
        if not data.sources:
            yield Problem(
                f"{where} has weights, and there is only data.kind={data.kind}",
                "name the sources in data.sources",
            )
        elif not stage.weights:
            yield Problem(f"{where}: its weights name no source", _known(data.sources))
        else:
            unknown = [name for name in stage.weights if name not in data.sources]
            if unknown:
                message = f"{where}: there is no source {', '.join(unknown)}"
                yield Problem(message, _known(data.sources))
            for name, weight in stage.weights.items():
                if weight <= 0:
                    yield Problem(
                        f"{where}: the weight of {name} is {weight:g}",
                        "leave it out: nothing is then drawn from it",
                    )
            yield from _sum("data.stages", "", stage.weights, f"{where}: ")


@rule(
    "TC344",
    "data.stages",
    "training.sequence_length",
    example=f"recipe=tiny {TWO_SOURCES} "
    "'data.stages=[{until: 0.5, sequence_length: 1000}, {}]'",
    files=TEXT,
)
def batches_keep_their_tokens(draft: Draft) -> Iterator[Problem]:
    """Samples of a stage's length fill every batch on every rank.

    A step has as many tokens in every stage. Samples of another length have to fill it exactly, on
    every rank.

    Fix: Choose a length that divides, as the message names.
    """
    config, batches = draft.config, draft.batches
    sections = keyed_sources(config.data).items()
    windows = [key for key, s in sections if getattr(s, "shuffle_shards", None) is not None]
    lengths = [(f"data.stages[{n}]: ", s.sequence_length) for n, s in enumerate(config.data.stages)]
    for where, length in [("training.", config.training.sequence_length), *lengths]:
        if length is None:
            continue
        key = "data.stages" if where != "training." else "training.sequence_length"
        if length > 1 and windows and SHARD_TOKENS % length:
            yield Problem(
                f"{where}sequence_length={length} does not divide a shard of {SHARD_TOKENS} "
                f"tokens, and {windows[0]}.shuffle_shards needs that",
                f"nearest legal: {1 << (length.bit_length() - 1)} or {1 << length.bit_length()}",
                key=key,
            )
        if key == "training.sequence_length":
            continue
        if length < 2 or length > config.model.max_position_embeddings:
            yield Problem(
                f"{where}sequence_length={length} is not from 2 to model.max_position_embeddings="
                f"{config.model.max_position_embeddings}",
                key=key,
            )
        elif length % config.parallelism.sequence_multiple:
            axes = config.parallelism
            context = f" x parallelism.context={axes.context}" if axes.context > 1 else ""
            yield Problem(
                f"{where}sequence_length={length} is not divided by parallelism.sequence="
                f"{axes.sequence}{context}",
                key=key,
            )
        elif batches is not None and batches_of_length(batches, length) is None:
            yield _not_whole(draft, where, length)


@rule(
    "TC349",
    "data.stages",
    "kernels.compile",
    example=f"recipe=tiny {TWO_SOURCES} 'data.stages=[{{until: 0.5, sequence_length: 128}}, {{}}]' "
    "kernels.compile=deepcompile",
    files=TEXT,
)
def lengths_suit_the_engine(draft: Draft) -> Iterator[Problem]:
    """Samples of another length suit what is compiled, sharded or multiplied in fp8.

    What is compiled, or multiplied in fp8, is made for one length of samples.

    Fix: Use kernels.compile=none, or one length in all stages.
    """
    config = draft.config
    if draft.batch is None:
        return
    for number, stage in enumerate(config.data.stages):
        length = stage.sequence_length
        batch = batch_of_length(draft.batch, length) if length else None
        if length is None or batch is None or length == draft.batch.sequence_length:
            continue
        what = f"data.stages[{number}]: sequence_length={length}"
        if config.kernels.is_compiled:
            yield Problem(
                f"{what} with kernels.compile={as_written(config.kernels.compile)}, which compiles "
                f"for samples of {draft.batch.sequence_length}",
                "kernels.compile=none, or one length",
                key="kernels.compile",
            )
        shards = config.parallelism.sequence_multiple * config.parallelism.tensor
        if config.parallelism.sequence_sharded_norms and length % shards:
            yield Problem(
                f"{what} is not a multiple of {shards}, over which "
                "parallelism.sequence_sharded_norms divides it",
                choices(nearest_multiples(length, shards), "sequence_length"),
            )
        spec = precision_of(config.precision)
        tokens = batch.micro_batch_size * length // config.parallelism.sequence_parts
        if spec.product_bytes is not None and tokens % spec.multiple:
            yield Problem(
                f"{what}: {tokens} tokens in a forward pass with precision.compute={spec.name}, "
                f"whose products take multiples of {spec.multiple}",
                choices(nearest_multiples(length, spec.multiple), "sequence_length"),
            )


def _not_whole(draft: Draft, where: str, length: int) -> Problem:
    assert draft.batches is not None
    smallest = min(draft.batches.phases, key=lambda phase: phase.batch.tokens_per_step).batch
    micro_tokens = smallest.micro_batch_size * smallest.sequence_length
    what = f"{where}sequence_length={length}"
    if length > micro_tokens:
        return Problem(
            f"{what} is more than a rank has room for at once: training.micro_batch_size="
            f"{smallest.micro_batch_size} of training.sequence_length={smallest.sequence_length}",
            f"training.sequence_length={length}, and the shorter length in the other stages",
            key="data.stages",
        )
    ranks = smallest.global_batch_size
    ranks //= smallest.micro_batch_size * smallest.gradient_accumulation_steps
    legal = [
        near
        for near in divisors(smallest.tokens_per_step)
        if near > 1 and batches_of_length(draft.batches, near) is not None
    ]
    near = sorted(sorted(legal, key=lambda each: abs(each - length))[:2])
    return Problem(
        f"{what}: a batch of {smallest.tokens_per_step} tokens is not made of whole samples of it, "
        f"as many on each of {ranks} data-parallel rank{'s' if ranks > 1 else ''}",
        f"nearest legal: {' or '.join(map(str, near))}",
        key="data.stages",
    )


def _sum(key: str, suffix: str, weights: Mapping[str, float], where: str = "") -> Iterator[Problem]:
    if (
        weights
        and all(weight > 0 for weight in weights.values())
        and not are_valid_weights(weights.values())
    ):
        total = sum(map(exact_fraction, weights.values()), Fraction(0))
        *_, name = weights
        yield Problem(
            f"{where}the weights {', '.join(f'{n} {w:g}' for n, w in weights.items())} have the "
            f"sum {float(total):g}",
            "shares have the sum 1; whole numbers are taken in proportion, such as 7 and 3",
            key=f"{key}.{name}{suffix}" if suffix else key,
        )


def _known(sources: Mapping[str, object]) -> str:
    return f"data.sources has {', '.join(sources)}"


def _end(stage: StageConfig) -> str:
    return " and ".join(
        f"{name}={getattr(stage, name):g}" for name in ENDS if getattr(stage, name) is not None
    )


def _is_within(stage: StageConfig) -> bool:
    if stage.until is not None:
        return 0 < stage.until < 1
    return (stage.until_step or stage.until_tokens or 0) > 0
