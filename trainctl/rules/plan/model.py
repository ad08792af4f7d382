"""Rules about the model: its shape, its first weights, its architecture, and muP."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainctl.config.schema import AttentionKind, CrossEntropyKind, WeightsKind
from trainctl.models.directory import ENCODERS
from trainctl.options import model as families
from trainctl.options import tokenizer as tokenizers
from trainctl.options.data import SampleKind
from trainctl.options.objective import LOG_PROBABILITIES, LOGITS, objective_of
from trainctl.options.optimizer import spec_of
from trainctl.plans.derive import choices, nearest_multiples
from trainctl.plans.mup import base_heads, width_factor
from trainctl.plans.shapes import anatomy, head_dim, is_encoder, key_value_heads
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule


@rule(
    "TC070",
    "model.path",
    situation="`model.family=hf` without a directory",
    message="model.family=hf needs model.path, a transformers directory with config.json",
)
def model_has_its_directory(draft: Draft) -> Iterator[Problem]:
    """The family hf has a model directory.

    The family hf takes its shape, and mostly its weights, from a directory of transformers.

    Fix: Set model.path=DIR, where DIR has config.json.
    """
    model = draft.config.model
    if model.is_directory and model.path is None:
        yield Problem(
            f"model.family={model.family} needs model.path, a transformers directory with "
            "config.json",
            "model.path=/path/to/model",
        )


@rule("TC402", "model.factory", example="recipe=tiny model=module")
def module_has_its_function(draft: Draft) -> Iterator[Problem]:
    """A module has the function that makes it.

    The family module has no shape of its own: everything is read from the module that your function
    returns.

    Fix: Set model.factory=package:function.
    """
    model = draft.config.model
    if model.is_module and model.factory is None:
        yield Problem(
            f"model.family={model.family} needs model.factory, the function that makes the module",
            "model.factory=package:function",
        )


@rule(
    "TC403",
    "data.mask_documents",
    "callbacks",
    "kernels.cross_entropy",
    "kernels.mlp_tiles",
    situation="A module whose code has no `masks_documents`, with `data.mask_documents=true`",
    message="data.mask_documents=true: the module of model.factory=mine:model does not say that "
    "its forward pass keeps documents apart",
)
def module_can_do_what_is_asked(draft: Draft) -> Iterator[Problem]:
    """A module of your own has what a setting needs of its code.

    A module is any code. Some settings rely on what only its author knows: that documents of one
    sequence do not see each other, or where its last hidden states are.

    Fix: Give the module what the message names (`trainctl.models.module`), or leave the setting
    out.
    """
    config = draft.config
    model, what = config.model, f"the module of model.factory={config.model.factory}"
    read = anatomy(model) if model.is_module and not model.is_unread else None
    if read is None or not config.trains_itself:
        return
    if config.data.mask_documents and not read.masks_documents:
        yield Problem(
            f"data.mask_documents=true: {what} does not say that its forward pass keeps documents "
            "apart",
            "data.mask_documents=false; or let a document begin where position_ids are 0, and set "
            "masks_documents = True in the module's class",
        )
    kind = config.kernels.cross_entropy
    if kind is CrossEntropyKind.chunked:
        yield Problem(
            f"kernels.cross_entropy=chunked: the loss of {what} is computed from all its logits",
            "kernels.cross_entropy=plain",
            key="kernels.cross_entropy",
        )
    if "task_evaluation" in config.callbacks:
        yield Problem(
            f"callbacks=[task_evaluation]: lm-eval asks models of transformers, and not {what}",
            "leave it out: the held-out loss is evaluated",
            key="callbacks",
        )
    if config.kernels.mlp_tiles > 1:
        yield Problem(
            f"kernels.mlp_tiles={config.kernels.mlp_tiles}: which layers of {what} treat each "
            "token by itself is not known",
            "kernels.mlp_tiles=1",
            key="kernels.mlp_tiles",
        )


@rule("TC144", "model.weights", example="recipe=tiny adapter=lora")
def weights_have_one_source(draft: Draft) -> Iterator[Problem]:
    """The initial weights have exactly one source.

    `model.weights` says whether a model starts from trained or from random weights, and
    `model.initial_weights` from which. Either they contradict each other, or an adapter,
    conversations, pairs of answers or a recipe that fine-tunes would train a random model. Planning
    needs no weights.

    Fix: Set model=hf model.path=DIR or model.initial_weights=DIR; model.weights=random where random
    weights are meant.
    """
    kind, folder = draft.config.model.weights, draft.config.model.initial_weights
    if kind is WeightsKind.random and folder is not None:
        yield Problem(
            f"model.weights=random, and model.initial_weights={folder} names others",
            "leave one of them out",
        )


@rule("TC094", "model.*", example="recipe=tiny model.num_layers=0")
def model_has_a_shape(draft: Draft) -> Iterator[Problem]:
    """Every size of the model is known and above 0.

    A size of 0 stands for one that a directory or your own function will give. Here nobody does.

    Fix: Set the size, or use model=hf with a directory.
    """
    config = draft.config
    if not config.model.has_closed_form:
        return
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
        if getattr(config.model, name) == 0:
            yield Problem(
                f"model.{name}=0: no model has that",
                f"model.{name}=1 at least",
                key=f"model.{name}",
            )


@rule(
    "TC071",
    "model.num_key_value_heads",
    "model.hidden_size",
    "model.head_dim",
    example="recipe=tiny model.num_key_value_heads=3",
)
def heads_share_the_width(draft: Draft) -> Iterator[Problem]:
    """Heads divide the width, and key-value heads divide the query heads.

    Heads share the width evenly, and query heads share key-value heads evenly.

    Fix: Use the nearest sizes that the message names, or model.head_dim, which frees the width.
    """
    model = draft.config.model
    if model.factory is not None:
        return  # the user's function divides the width
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if model.head_dim is None and model.hidden_size % heads:
        yield Problem(
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={heads}",
            f"{choices(nearest_multiples(model.hidden_size, heads), 'model.hidden_size')}, "
            "or set model.head_dim",
            key="model.hidden_size",
        )
    if kv_heads is not None and heads % kv_heads:
        yield Problem(
            f"model.num_key_value_heads={kv_heads} does not divide "
            f"model.num_attention_heads={heads}",
            f"model.num_key_value_heads={heads}",
        )
    if not families.spec_of(model).has_equal_heads:
        return
    if kv_heads not in (None, heads):
        yield Problem(
            f"model.num_key_value_heads={kv_heads}: {model.family} has no grouped-query attention",
            "leave it out",
        )
    if model.head_dim not in (None, model.hidden_size // heads):
        yield Problem(
            f"model.head_dim={model.head_dim}: {model.family}'s heads share model.hidden_size="
            f"{model.hidden_size} evenly",
            f"model.head_dim={model.hidden_size // heads}, or leave it out",
            key="model.head_dim",
        )


@rule("TC072", "model.vocab_size", example="recipe=tiny model.vocab_size=256")
def vocabulary_holds_the_tokenizer(draft: Draft) -> Iterator[Problem]:
    """The embedding has a row for every token id of the tokenizer.

    An id without a row in the embedding is an index error in the first batch that has it.

    Fix: Make model.vocab_size at least the ids of the tokenizer; a multiple of 64 is faster on
    GPUs.
    """
    rows, tokenizer = draft.config.model.vocab_size, draft.config.tokenizer
    spec = tokenizers.spec_of(tokenizer)
    ids = spec.facts(tokenizer).vocab_size if spec.file is None else 0
    if 0 < rows < ids:
        yield Problem(
            f"model.vocab_size={rows} is smaller than the {spec.name} tokenizer's {ids} ids",
            f"model.vocab_size={ids} or more",
        )


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
        what = config.model.factory if config.model.is_module else config.model.model_type
        own = ", or give the module initialize(name, tensor)" if config.model.is_module else ""
        yield Problem(
            f"the code of {what} starts {read.unsharded_init} by what cannot be done for a rank's "
            "part of it",
            f"model.initial_weights=DIR, a directory with weights{own}",
        )


@rule(
    "TC370",
    "data.mask_documents",
    "model.attention",
    situation="A directory of a recurrent model, with `data.mask_documents=true`",
    message="data.mask_documents=true: theirs carries a state from token to token, which nothing "
    "resets where a document ends",
)
def documents_are_kept_apart(draft: Draft) -> Iterator[Problem]:
    """The model keeps the documents of a sample apart with its attention, if it has to.

    A small model of the same class is given two documents in one row, once with another first
    document: its outputs for the second one must not change. They change where the code gives its
    attention no mask of documents, or where a layer (Mamba, a convolution) carries a state from
    token to token into the next document.

    Fix: Set data.mask_documents=false, the attention that the message names, or use another model.
    """
    config = draft.config
    model = config.model
    read = None if model.is_unread or not config.data.mask_documents else anatomy(model)
    if read is None or model.attention.value not in read.joined_attentions:
        return
    what = model.model_type or f"model.factory={model.factory}"
    others = [each for each in read.attentions if each not in read.joined_attentions]
    hints = [f"model.attention={each}" for each in others]
    if objective_of(config.objective).takes is SampleKind.text:
        hints.append("data.mask_documents=false")
    yield Problem(
        f"data.mask_documents=true: {what} carries a state from token to token, which nothing "
        "resets where a document ends"
        if read.is_recurrent
        else f"data.mask_documents=true with model.attention={model.attention.value}: no small "
        f"model of {what} kept the documents of a sample apart",
        " or ".join(hints) or f"another model: objective={config.objective.kind} needs it",
    )


@rule(
    "TC480",
    "objective.kind",
    "training.sample_tokens",
    "model.vocab_size",
    situation="A directory of a BERT with `objective=next_token`",
    message="objective.kind=next_token with bert, an encoder: a token sees the next one, which it "
    "would predict",
)
def encoders_predict_hidden_tokens(draft: Draft) -> Iterator[Problem]:
    """An encoder predicts hidden tokens, and a decoder the next one.

    Each token of an encoder attends to those after it, so the next one is no secret, and it
    continues no text. A decoder does not see what follows a hidden token.

    Fix: Use objective=masked with model.path of a BERT or ModernBERT, and no
    training.sample_tokens.
    """
    config = draft.config
    model, objective = config.model, objective_of(config.objective)
    if not config.trains_itself or model.is_unread:
        return
    what = model.model_type or model.family
    if not is_encoder(model):
        if objective.hides_tokens:
            yield Problem(
                f"objective.kind={objective.name} with {what}: its tokens attend to earlier ones "
                "alone",
                f"objective=next_token, or model.path of a {' or '.join(ENCODERS)}",
            )
        return
    if objective.reads in (LOG_PROBABILITIES, LOGITS) and not objective.hides_tokens:
        yield Problem(
            f"objective.kind={objective.name} with {what}, an encoder: a token sees the next one, "
            "which it would predict",
            "objective=masked",
        )
    if config.training.sample_tokens:
        yield Problem(
            f"training.sample_tokens={config.training.sample_tokens} with {what}: an encoder "
            "continues no text",
            "training.sample_tokens=0",
            key="training.sample_tokens",
        )
    source = tokenizers.spec_of(config.tokenizer)
    mask = source.facts(config.tokenizer).mask_token if source.file is None else None
    if objective.hides_tokens and mask is not None and model.vocab_size <= mask:
        yield Problem(
            f"model.vocab_size={model.vocab_size} has no row for {mask}, the {source.name} "
            "tokenizer's mask token",
            f"model.vocab_size={mask + 1} or more",
            key="model.vocab_size",
        )


@rule("TC015", "model.mup_base_width", example="recipe=tiny model.mup=true")
def mup_has_a_base(draft: Draft) -> Iterator[Problem]:
    """muP has a base width, and the model has the proportions of the base.

    muP scales from a narrow model on which the learning rate was tuned. Without its width all
    factors would be 1, and the setting would do nothing.

    Fix: Set model.mup_base_width to the hidden size of the model that was tuned.
    """
    model = draft.config.model
    if not model.mup or not draft.config.trains_itself:
        return
    if model.mup_base_width is None:
        yield Problem(
            "model.mup=true says nothing without the width that the learning rate was tuned on",
            "model.mup_base_width=256, say",
        )
        return
    if all(heads >= 1 and heads.is_integer() for heads in base_heads(model)):
        return
    heads, kv_heads = base_heads(model)
    wanted = f"{heads:g} heads, {kv_heads:g} of them for keys and values"
    yield Problem(
        f"a model of model.mup_base_width={model.mup_base_width} with the proportions of this one "
        f"({model.num_attention_heads} and {key_value_heads(model)} heads in {model.hidden_size}) "
        f"would have {wanted}: muP holds where the numbers of heads grow with the width",
        _possible_base(draft, model.mup_base_width),
    )


def _possible_base(draft: Draft, wanted: int) -> str:
    """Return the base width setting nearest to `wanted` with whole numbers of heads; empty if
    none.
    """
    model = draft.config.model
    common = gcd(model.num_attention_heads, key_value_heads(model))
    # The base has k of the `common` equal parts that this model's heads make.
    own = model.hidden_size * (model.mup_base_head_dim or head_dim(model))
    parts = common * head_dim(model)
    widths = [own * k // parts for k in range(1, 8 * common) if own * k % parts == 0]
    if not widths:
        return ""
    nearest = min(widths, key=lambda width: abs(width - wanted))
    return f"model.mup_base_width={nearest}"


@rule(
    "TC016",
    "model.mup",
    "model.initial_weights",
    situation="`model=hf` on a directory of bloom, with `model.mup=true model.mup_base_width=64`",
    message="model.mup=true with model.family=hf (bloom): which of its tensors grow with the "
    "width is not known",
)
def mup_knows_the_model(draft: Draft) -> Iterator[Problem]:
    """muP knows which tensors of the model grow with its width, and trains from step 0.

    Which tensor grows with the width in which dimension has to be known to scale its first weights
    and its learning rate.

    Fix: Train a model of the listed families from the beginning, or set model.mup=false.
    """
    model = draft.config.model
    if not model.mup or not draft.config.trains_itself:
        return
    if model.factory is not None or not families.spec_of(model).has_mup:
        type_ = f" ({model.model_type})" if model.is_directory else ""
        what = (
            f"model.factory={model.factory}"
            if model.factory is not None
            else f"model.family={model.family}{type_}"
        )
        known = ", ".join(spec.name for spec in families.families() if spec.has_mup)
        yield Problem(
            f"model.mup=true with {what}: which of its tensors grow with the width is not known",
            f"model.mup=false, or a model of {known}",
        )
    if model.initial_weights is not None:
        yield Problem(
            "model.mup=true says how weights are drawn, and model.initial_weights has them already",
            "model.mup=false to train on from an export; `trainctl resume` to go on with a muP run",
            key="model.initial_weights",
        )


@rule(
    "TC017",
    "model.mup",
    "optimizer.weight_decay",
    example="recipe=tiny optimizer=lamb model.mup=true model.mup_base_width=64",
)
def mup_knows_the_optimizer(draft: Draft) -> Iterator[Problem]:
    """muP has rules for the optimizer.

    The rules are derived for one kind of update. A step that is normalised by each tensor (LAMB,
    Adafactor) is of another size already, and no transfer has been shown.

    Fix: Use optimizer=adamw, or another optimizer that the table of optimizers marks.
    """
    model, optimizer = draft.config.model, draft.config.optimizer
    if not model.mup or not draft.config.trains_itself or width_factor(model) == 1:
        return
    spec = spec_of(optimizer)
    if spec.width_rule is None:
        yield Problem(
            f"model.mup=true with optimizer.kind={spec.name}: its step follows each tensor's own "
            "norm, and no rule for its learning rates is known to transfer",
            "optimizer=adamw",
        )
    if spec.decays_gradient and optimizer.weight_decay > 0:
        yield Problem(
            f"model.mup=true with optimizer.kind={spec.name} and optimizer.weight_decay="
            f"{optimizer.weight_decay:g}: a decay inside the gradient, which Adam then normalises, "
            "has another strength at each width",
            "optimizer.weight_decay=0, or optimizer=adamw",
            key="optimizer.weight_decay",
        )


@rule(
    "TC018",
    "gradients.*",
    severity=WARNING,
    example="recipe=tiny model.mup=true model.mup_base_width=64 gradients.clip_value=0.1",
)
def elements_have_the_size_of_the_base(draft: Draft) -> Iterator[Problem]:
    """Settings for single gradient elements are not transferred between widths by muP.

    At width m times the base's, single elements of a gradient are 1/m as large. A limit or a noise
    that is set for elements was right for one width only.

    Fix: Divide the value that was right on the base by the ratio of the widths.
    """
    config, m = draft.config, width_factor(draft.config.model)
    if m == 1 or not config.trains_itself:
        return
    gradients = config.gradients
    for name, power in (("clip_value", 1), ("noise", 2)):
        value = getattr(gradients, name)
        if value > 0:
            yield Problem(
                f"gradients.{name}={value:g} with model.mup=true: elements of the gradient are "
                f"1 / {m:g} of the base's, and this is not scaled with them",
                f"gradients.{name}={value / m**power:g}, if {value:g} was right for the base",
                key=f"gradients.{name}",
            )
