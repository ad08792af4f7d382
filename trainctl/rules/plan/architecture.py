"""Rules about the architecture of a model directory, by the anatomy read from its code."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import AttentionKind
from trainctl.plan.shapes import anatomy
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule


@rule(
    "TC153",
    "model.attention",
    situation="A directory of a model whose attention caps its scores, with `model.attention=sdpa`",
    message="model.attention=sdpa: transformers has none for theirs (its attention caps or "
    "extends the scores)",
)
def architecture_has_the_attention(draft: Draft) -> Iterator[Problem]:
    """transformers implements model.attention for the architecture.

    Of each architecture transformers has some kinds of attention only: scores that are capped or
    extended have no sdpa.

    Fix: Choose the kind that the message names; eager is always there, and slowest.
    """
    model = draft.config.model
    read = None if model.is_unread or model.factory is not None else anatomy(model)
    if read is None or model.attention.value in read.attentions:
        return
    on_gpus = {AttentionKind.flash_attention_2.value: " (on GPUs)"}
    yield Problem(
        f"model.attention={model.attention.value}: transformers has none for {model.model_type} "
        "(its attention caps or extends the scores)",
        "model.attention="
        + " or ".join(f"{name}{on_gpus.get(name, '')}" for name in read.attentions),
    )


@rule(
    "TC401",
    "model.initial_weights",
    situation="A directory whose code draws a tensor as a whole, without weights",
    message="the code of theirs starts model.layers.0.mixer.A_log by what cannot be done for a "
    "rank's part of it",
)
def first_weights_can_be_drawn(draft: Draft) -> Iterator[Problem]:
    """Each element of the initial weights can be drawn on its own.

    First weights are a function of seed and name, drawn by each rank for its own part. Some models'
    code draws a whole tensor by a rule that has no parts.

    Fix: Set model.initial_weights=DIR with weights, or use one rank.
    """
    config = draft.config
    if config.model.initial_weights is not None or not config.trains_itself:
        return
    read = None if config.model.is_unread else anatomy(config.model)
    if read is not None and read.unsharded_init:
        yield Problem(
            f"the code of {config.model.model_type} starts {read.unsharded_init} by what cannot be "
            "done for a rank's part of it",
            "model.initial_weights=DIR, a directory with weights",
        )


@rule(
    "TC370",
    "data.mask_documents",
    situation="A directory of a recurrent model, with `data.mask_documents=true`",
    message="data.mask_documents=true: theirs carries a state from token to token, which nothing "
    "resets where a document ends",
)
def state_ends_with_its_document(draft: Draft) -> Iterator[Problem]:
    """A recurrent state is not expected to end with its document.

    A recurrent layer (Mamba and its like) carries a state from token to token. Attention can be
    masked at the end of a document; the state goes on into the next.

    Fix: Set data.mask_documents=false, or use a model without such layers.
    """
    config = draft.config
    read = None if config.model.is_unread else anatomy(config.model)
    if read is not None and read.is_recurrent and config.data.mask_documents:
        yield Problem(
            f"data.mask_documents=true: {config.model.model_type} carries a state from token to "
            "token, which nothing resets where a document ends",
            "data.mask_documents=false",
        )
