"""Rules about the objective: its samples, and the settings it has been verified with."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import CompileKind, CrossEntropyKind, OnTooLong, RunConfig
from trainctl.options.data import spec_of
from trainctl.options.objective import PAIRS, objective_of
from trainctl.plan.experts import auxiliary_loss
from trainctl.plan.mixture import sources_of
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule

KEY = "objective.kind"


@rule("TC392", "*", example="recipe=tiny objective=dpo parallelism.sequence=2")
def objective_goes_with_the_rest(draft: Draft) -> Iterator[Problem]:
    """An objective over whole samples has them on one rank.

    DPO and its like compare log-probabilities of whole answers, which a rank of the sequence axis
    or a pipeline stage does not have.

    Fix: Use data and tensor parallelism, or objective=next_token.
    """
    config = draft.config
    spec = objective_of(config.objective)
    if not spec.build or not config.trains_itself:
        return
    for key, value, why, nearest in _not_beside(config):
        yield Problem(
            f"{key}={value} with {KEY}={spec.name}: {why}",
            f"{nearest}, or objective=next_token",
            key=key,
        )


@rule(
    "TC393",
    "data.sources",
    "data.factory",
    "data.sources.*.kind",
    "data.kind",
    "data.mask_documents",
    "data.on_too_long",
    "objective.kind",
    example="recipe=tiny objective=simpo",
)
def objective_has_its_samples(draft: Draft) -> Iterator[Problem]:
    """A preference objective has pairs of answers, and pairs have a preference objective.

    A preference is between two answers to one prompt. Other data has no pairs, and pairs have no
    next token to learn.

    Fix: Use data=preferences with objective=dpo or another objective on pairs.
    """
    config = draft.config
    if not config.trains_itself:
        return
    objective, source = objective_of(config.objective), spec_of(config.data)
    wants_pairs, has_pairs = objective.counts == PAIRS, source.has_pairs
    if wants_pairs and config.data.sources:
        yield Problem(
            f"data.sources with {KEY}={objective.name}: pairs of several sources have not been "
            "shown to be the same on every layout",
            "name all files in data.paths",
        )
    elif config.data.sources:
        for name, section in sources_of(config.data).items():
            if spec_of(section).has_pairs:
                yield Problem(
                    f"data.sources.{name}.kind={section.kind} has pairs of answers, and "
                    f"{KEY}={objective.name} would learn the rejected ones too",
                    f"data.sources.{name}.kind=chat, with the chosen answers",
                    key=f"data.sources.{name}.kind",
                )
    elif wants_pairs and config.data.factory is not None:
        yield Problem(
            f"data.factory={config.data.factory} with {KEY}={objective.name}: a function gives "
            "texts, and no pairs of them",
            "data.factory=null, with the files of pairs in data.paths",
            key="data.factory",
        )
    elif wants_pairs and not has_pairs:
        yield Problem(
            f"{KEY}={objective.name} learns from pairs of answers, and data.kind={source.name} has "
            "none",
            "data=preferences, or objective=next_token",
            key="data.kind",
        )
    elif has_pairs and not config.data.mask_documents:
        yield Problem(
            f"data.mask_documents=false with data.kind={source.name}: the rejected answer would "
            "see the chosen one",
            "data.mask_documents=true",
            key="data.mask_documents",
        )
    elif has_pairs and config.data.on_too_long is OnTooLong.cut:
        yield Problem(
            f"data.on_too_long=cut with data.kind={source.name}: what is left of a pair would be "
            "the chosen answer alone",
            "data.on_too_long=drop or error",
            key="data.on_too_long",
        )
    elif has_pairs and not wants_pairs:
        yield Problem(
            f"data.kind={source.name} has pairs of answers, and {KEY}={objective.name} would learn "
            "the rejected ones too",
            "objective=dpo, or data=chat with the chosen answers",
            key=KEY,
        )


def _not_beside(config: RunConfig) -> Iterator[tuple[str, object, str, str]]:
    """Yield key, value, reason and nearest legal setting of what the objective excludes."""
    axes, kernels = config.parallelism, config.kernels
    for name, why in (
        ("sequence", "a rank sees a part of an answer alone"),
        ("pipeline", "the loss of a last stage is that of the next token"),
    ):
        if getattr(axes, name) > 1:
            yield f"parallelism.{name}", getattr(axes, name), why, f"parallelism.{name}=1"
    if kernels.cross_entropy is not CrossEntropyKind.plain:
        why = "it sums the losses of a chunk, and whose token was whose is not known any more"
        yield "kernels.cross_entropy", kernels.cross_entropy.value, why, "kernels=default"
    if kernels.compile is CompileKind.deepcompile:
        why = "it has not been compared"
        yield "kernels.compile", "deepcompile", why, "kernels.compile=none"
    if config.stability.z_loss > 0:
        why = "it is a part of the next token's loss"
        yield "stability.z_loss", f"{config.stability.z_loss:g}", why, "stability.z_loss=0"
    for name, weight in (
        ("auxiliary_loss", auxiliary_loss(config)),
        ("z_loss", config.experts.z_loss),
    ):
        if weight > 0 and (config.model.num_experts or 1) > 1:
            why = "it is weighted by tokens"
            yield f"experts.{name}", f"{weight:g}", why, f"experts.{name}=0"
