"""Rules about the expert axis: its size, and the settings it has been verified with."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainctl.config.codec import value_at
from trainctl.config.keys import as_written
from trainctl.config.schema import CompileKind, OffloadDevice, RunConfig
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.optimizer import ELEMENT, spec_of
from trainctl.plans.derive import choices, nearest_divisors
from trainctl.plans.settings import auxiliary_loss
from trainctl.plans.shapes import anatomy
from trainctl.rules.plan.draft import Draft, limit_problems
from trainctl.rules.rule import WARNING, Problem, rule

KEY = "parallelism.expert"


@rule("TC009", "parallelism.expert", example="recipe=tiny parallelism.expert=2")
def experts_are_shared_out(draft: Draft) -> Iterator[Problem]:
    """The expert axis divides the experts and the data-parallel ranks.

    Each rank of the expert axis, and each of its tensor ranks, keeps some experts whole and sends
    tokens to the others. Without experts there is nothing to share out, and an uneven share would
    leave ranks waiting.

    Fix: Set parallelism.expert=1 for a dense model; otherwise choose a size that divides the
    experts and the data-parallel ranks.
    """
    model, expert = draft.config.model, draft.config.parallelism.expert
    if expert == 1 or not draft.config.trains_itself:
        return
    if not _has_experts(draft.config):
        what = f"the model of {model.path}" if model.is_directory else f"the {model.family} family"
        yield Problem(f"{KEY}={expert}, but {what} has no experts", f"{KEY}=1")
        return
    read = None if model.is_unread else anatomy(model)
    if read is not None and read.has_custom_expert_forward:
        yield Problem(
            f"{KEY}={expert}: the experts of {model.model_type} are multiplied by its own code, "
            "which keeps all of them on a rank",
            f"{KEY}=1",
        )
        return
    data, count = draft.mesh.data if draft.mesh is not None else 0, model.num_experts or 1
    tensor = draft.config.parallelism.tensor
    beside = f" over {tensor} tensor ranks each" if tensor > 1 else ""
    for whole, what in (
        (data, f"the data-parallel size {data}"),
        (count / tensor, f"the model's {count} experts{beside}"),
    ):
        if whole % expert:
            shared = 1 if count % tensor else count // tensor
            nearest = nearest_divisors(gcd(data, shared), expert)
            yield Problem(f"{KEY}={expert} does not divide {what}", choices(nearest, KEY))


@rule(
    "TC390",
    "*",
    situation="A model with 8 experts, `parallelism.expert=2 parallelism.sequence=2`",
    message="parallelism.sequence=2 with parallelism.expert=2: it has not been compared with one "
    "process",
)
def expert_axis_goes_with_the_rest(draft: Draft) -> Iterator[Problem]:
    """The expert axis is combined only with settings it was verified with.

    A layout counts as supported when its losses were those of one process.

    Fix: Use the value that the message names, or parallelism.expert=1.
    """
    config = draft.config
    expert = config.parallelism.expert
    if expert == 1 or not config.trains_itself:
        return
    yield from limit_problems(config, LIMITS, f"{KEY}={expert}", f"{KEY}=1")
    optimizer = spec_of(config.optimizer)
    if optimizer.needs != ELEMENT:
        yield Problem(
            f"optimizer.kind={optimizer.name} with {KEY}={expert}: one element's update needs "
            f"{optimizer.needs}, and looks for it on all replicas",
            f"optimizer=adamw, or {KEY}=1",
            key="optimizer.kind",
        )


@rule(
    "TC155",
    "experts.auxiliary_loss",
    severity=WARNING,
    situation="A model with 8 experts, `experts.auxiliary_loss=0`",
    message="nothing keeps the 8 experts equally busy",
)
def experts_are_kept_busy(draft: Draft) -> Iterator[Problem]:
    """A mixture of experts has a balancing loss or bias.

    A router learns to prefer what already works. Without a balancing loss or a moved bias a few
    experts get all tokens, and the weights of the others are wasted.

    Fix: Set experts.auxiliary_loss=0.001, or experts.bias_update_rate=0.001.
    """
    config = draft.config
    if not config.trains_itself or not _has_experts(config):
        return
    if auxiliary_loss(config) == 0 and config.experts.bias_update_rate == 0:
        yield Problem(
            f"nothing keeps the {config.model.num_experts} experts equally busy: the loss is the "
            "cross entropy alone (router_aux_loss_coef of config.json counts where its "
            "output_router_logits is true, as in transformers)",
            "experts.auxiliary_loss=0.001, or experts.bias_update_rate=0.001 where the routers "
            "have a bias; for short fine-tuning it matters little",
        )


@rule(
    "TC391",
    "experts.*",
    situation="A model with 8 experts, `experts.auxiliary_loss=0.1 parallelism.sequence=2`",
    message="experts.auxiliary_loss=0.1 with parallelism.sequence=2: a rank does not see all that"
    " the routers make of a sequence",
)
def balance_is_that_of_whole_sequences(draft: Draft) -> Iterator[Problem]:
    """Balancing losses are computed on whole sequences and all blocks.

    A balancing loss is a mean over all tokens of a sequence and over all routers. A rank that sees
    a part would add another loss. Tensor ranks see all, unless the norms are sharded.

    Fix: Set experts.auxiliary_loss=0 with experts.bias_update_rate, or the axis to 1.
    """
    config = draft.config
    losses = {"auxiliary_loss": auxiliary_loss(config), "z_loss": config.experts.z_loss}
    if not config.trains_itself or not _has_experts(config):
        return
    legal = {"sequence": 1, "context": 1, "pipeline": 1, "sequence_sharded_norms": False}
    beside = next((key for key in legal if getattr(config.parallelism, key) > legal[key]), None)
    for name, weight in losses.items():
        if weight > 0 and beside is not None:
            value, instead = map(as_written, (getattr(config.parallelism, beside), legal[beside]))
            yield Problem(
                f"experts.{name}={weight:g} with parallelism.{beside}={value}: a rank does not see "
                "all that the routers make of a sequence",
                f"experts.{name}=0, or parallelism.{beside}={instead}",
                key=f"experts.{name}",
            )


@rule(
    "TC400",
    "experts.*",
    situation="A directory whose own code routes tokens, with `experts.auxiliary_loss=0.1`",
    message="experts.auxiliary_loss=0.1: the routers of theirs are a part of code of its own, "
    "which does not show what they choose",
)
def balance_can_be_kept(draft: Draft) -> Iterator[Problem]:
    """Expert balancing sees the routers, and moves a bias that they have.

    To keep experts equally busy, their routers have to be seen: which experts a token chose. The
    code of some models does not show it, and some routers have no bias to move.

    Fix: Leave the balancing out; such a model often balances itself.
    """
    config, model = draft.config, draft.config.model
    read = None if model.is_unread else anatomy(model)
    if read is None or not _has_experts(config) or not config.trains_itself:
        return
    settings = {
        "auxiliary_loss": auxiliary_loss(config),
        "z_loss": config.experts.z_loss,
        "bias_update_rate": config.experts.bias_update_rate,
    }
    for name, value in settings.items():
        key = f"experts.{name}"
        if value > 0 and (read.has_custom_expert_forward or read.has_unknown_routers):
            yield Problem(
                f"{key}={value:g}: the routers of {model.model_type} are a part of code of its "
                "own, which does not show what they choose",
                f"{key}=0",
                key=key,
            )
        elif value > 0 and name == "bias_update_rate" and not read.has_biased_routers:
            yield Problem(
                f"{key}={value:g}: the routers of {model.model_type} have no bias that experts are "
                "chosen by",
                f"{key}=0, and experts.auxiliary_loss=0.001 in its place",
                key=key,
            )


def _has_experts(config: RunConfig) -> bool:
    return config.model.is_directory and (config.model.num_experts or 1) > 1


def _needed_below_3(name: str) -> Limit:
    """Return the limit that a switch of ZeRO is on at stages 1 and 2."""
    key = f"zero_stage.{name}"
    return Limit(
        key=key,
        holds=lambda config: config.zero_stage.stage not in (1, 2) or value_at(config, key),
        why="DeepSpeed averages the gradients of experts with it alone",
        nearest=f"{key}=true",
    )


_UNSHOWN = "it has not been compared with one process"
_GROUPS = "its groups are made for parameters that all replicas have"

LIMITS = (
    only_value("parallelism.sequence", 1, _UNSHOWN),
    only_value("parallelism.context", 1, _UNSHOWN),
    only_value("precision.autocast", False, _UNSHOWN, "precision=bf16"),
    Limit(
        key="precision.compute",
        holds=lambda config: (
            config.precision.autocast or config.precision.compute in ("fp32", "bf16")
        ),
        why=_UNSHOWN,
        nearest="precision=bf16",
    ),
    never_value("offload.optimizer", OffloadDevice.nvme, _UNSHOWN, "offload.optimizer=cpu"),
    never_value("offload.parameters", OffloadDevice.nvme, _UNSHOWN, "offload.parameters=cpu"),
    only_value("offload.ratio", 1, _UNSHOWN),
    only_value("offload.zenflow", False, _UNSHOWN),
    only_value("offload.super_offload", False, _UNSHOWN),
    only_value(
        "zero_stage.hpz_partition_size",
        1,
        "the copy within a node is of parameters that all its devices share",
    ),
    only_value("zero_stage.quantized_weights", False, _GROUPS),
    only_value("zero_stage.quantized_gradients", False, _GROUPS),
    _needed_below_3("contiguous_gradients"),
    _needed_below_3("reduce_scatter"),
    only_value(
        "kernels.compile",
        CompileKind.none,
        "how many tokens travel is known on the host only, in each layer",
    ),
    only_value("gradients.centralize", False, _UNSHOWN),
)
"""Settings that the expert axis has been verified with."""
