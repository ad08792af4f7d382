"""Rules about maximal-update parametrisation (muP): models, optimizers, and the base width."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainctl.options import model as families
from trainctl.options.optimizer import spec_of
from trainctl.plan.mup import base_heads, width_factor
from trainctl.plan.shapes import head_dim, key_value_heads
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule


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
