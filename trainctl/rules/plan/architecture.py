"""Rules about the architecture of a model directory, by the anatomy read from its code."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import AttentionKind
from trainctl.errors import Finding
from trainctl.plan.shapes import anatomy
from trainctl.rules.plan.draft import Draft, error


def architecture_has_the_attention(draft: Draft) -> Iterator[Finding]:
    """`model.attention` is one that transformers has for the architecture."""
    model = draft.config.model
    read = None if model.is_unread or model.factory is not None else anatomy(model)
    if read is None or model.attention.value in read.attentions:
        return
    on_gpus = {AttentionKind.flash_attention_2.value: " (on GPUs)"}
    yield error(
        "model.attention",
        f"model.attention={model.attention.value}: transformers has none for {model.model_type} "
        "(its attention caps or extends the scores)",
        "model.attention="
        + " or ".join(f"{name}{on_gpus.get(name, '')}" for name in read.attentions),
    )


def first_weights_can_be_drawn(draft: Draft) -> Iterator[Finding]:
    """A rank draws its own elements alone, so each has to be drawn by itself."""
    config = draft.config
    if config.model.initial_weights is not None or not config.trains_itself:
        return
    read = None if config.model.is_unread else anatomy(config.model)
    if read is not None and read.unsharded_init:
        yield error(
            "model.initial_weights",
            f"the code of {config.model.model_type} starts {read.unsharded_init} by what cannot be "
            "done for a rank's part of it",
            "model.initial_weights=DIR, a directory with weights",
        )


def state_ends_with_its_document(draft: Draft) -> Iterator[Finding]:
    """A recurrent state has no mask: it goes on from one document of a sample into the next."""
    config = draft.config
    read = None if config.model.is_unread else anatomy(config.model)
    if read is not None and read.is_recurrent and config.data.mask_documents:
        yield error(
            "data.mask_documents",
            f"data.mask_documents=true: {config.model.model_type} carries a state from token to "
            "token, which nothing resets where a document ends",
            "data.mask_documents=false",
        )
