"""Rules about the optimizer, its parameter groups, and the objective."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress

from trainctl.config.registry import load_spec, load_specs
from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    LrScaling,
    OffloadDevice,
    OnTooLong,
    RunConfig,
)
from trainctl.errors import TrainctlError
from trainctl.models.tensors import SCORE
from trainctl.options.data import SampleKind
from trainctl.options.data import spec_of as data_spec_of
from trainctl.options.data.stream import StreamConfig
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.model import spec_of as model_of
from trainctl.options.objective import objective_of
from trainctl.options.objective.classify import ClassifyConfig
from trainctl.options.objective.distill import DistillConfig
from trainctl.options.objective.masked import MaskedConfig
from trainctl.options.optimizer import Maker, spec_of
from trainctl.options.reward import RewardsConfig
from trainctl.options.reward.function import FunctionRewardConfig
from trainctl.plans.mixture import keyed_sources
from trainctl.plans.optimizers import refused_settings
from trainctl.plans.settings import auxiliary_loss
from trainctl.plans.trainable import frozen_names, trainable
from trainctl.rules.deepspeed import optimizer as json_optimizer
from trainctl.rules.plan.draft import Draft, limit_problems, on_json
from trainctl.rules.rule import Problem, rule, warning_problem


@rule("TC059", "*", example="recipe=tiny optimizer=adamw_8bit parallelism.tensor=2")
def optimizer_fits_the_layout(draft: Draft) -> Iterator[Problem]:
    """The optimizer supports the ZeRO stage, offload, shards and state format of the plan.

    Each optimizer has a table of what it allows. 8-bit AdamW scales blocks of 256 elements, which
    are others in a shard of a matrix; its states have no kernel on the host.

    Fix: Use the option that the message names, or optimizer=adamw, which goes with everything.
    """
    if not draft.config.trains_itself:
        return  # DeepSpeed builds the optimizer and reports what it refuses
    kind = draft.config.optimizer.kind
    for refusal in refused_settings(draft.config):
        yield Problem(
            f"{refusal.key}={refusal.value} with optimizer.kind={kind}: {refusal.why}",
            f"{refusal.nearest}, or optimizer=adamw",
            key=refusal.key,
        )


@rule("TC060", "optimizer.groups", example="recipe=tiny 'optimizer.groups=[{match: lm_haed}]'")
def groups_match_parameters(draft: Draft) -> Iterator[Problem]:
    """Each entry of optimizer.groups is the first to match some trained parameter.

    The first entry of optimizer.groups whose pattern is found in a parameter's name holds. One that
    meets nothing would be ignored, mostly for a typing mistake.

    Fix: `trainctl plan` and the message list names; write special entries before general ones.
    """
    config = draft.config
    if not config.optimizer.groups or config.model.is_unread:
        return
    left = [tensor.name for tensor in trainable(config).trained]
    names_are_known = config.model.factory is None
    for index, entry in enumerate(config.optimizer.groups):
        key = f"optimizer.groups[{index}]"
        try:
            pattern = re.compile(entry.match)
        except re.error as problem:
            yield Problem(
                f"{key}.match={entry.match} is not a regular expression: {problem}",
                r"such as match: 'embed_tokens|wte', or match: 'layers\.[0-3]\.'",
            )
            continue
        for name, limit, is_legal in (
            ("lr_factor", "above 0", entry.lr_factor > 0),
            ("weight_decay", "at least 0", (entry.weight_decay or 0) >= 0),
            ("gradient_clipping", "at least 0", (entry.gradient_clipping or 0) >= 0),
        ):
            if not is_legal:
                value = getattr(entry, name)
                yield Problem(f"{key}.{name}={value:g} is not {limit}", f"{name}: 1")
        matched = [name for name in left if pattern.search(name)]
        if names_are_known and (not matched or not entry.match):
            what = "is empty" if not entry.match else "matches no parameter that is left for it"
            yield Problem(
                f"{key}.match={entry.match!r} {what}; the first entry that matches holds",
                f"the names are such as {left[0]}" if left else "leave it out",
            )
        left = [name for name in left if name not in set(matched)]


@rule("TC064", "optimizer.lr_scaling_batch_size", example="recipe=tiny optimizer.lr_scaling=linear")
def scaled_rate_has_its_batch(draft: Draft) -> Iterator[Problem]:
    """A learning rate that is scaled with the batch size has a reference batch size.

    With lr_scaling the rate grows with the batch (linearly, or by its root) from the batch that it
    was tuned at. Without that batch the factor is unknown.

    Fix: Set optimizer.lr_scaling_batch_size in sequences; it is given only together with
    lr_scaling.
    """
    optimizer = draft.config.optimizer
    if optimizer.lr_scaling is LrScaling.none or optimizer.lr_scaling_batch_size is not None:
        return
    size = draft.batch.global_batch_size if draft.batch is not None else 256
    key = "optimizer.lr_scaling_batch_size"
    yield Problem(
        f"optimizer.lr_scaling={optimizer.lr_scaling.value} needs {key}, the global batch in "
        "sequences that optimizer.lr is meant for",
        f"{key}={size} leaves optimizer.lr as it is",
    )


@rule("TC061", "optimizer.fused", example="recipe=tiny optimizer=lamb optimizer.fused=true")
def fused_kernel_is_there(draft: Draft) -> Iterator[Problem]:
    """The optimizer has a fused kernel for the device.

    A fused kernel makes the update in one pass. Not every kind has one, and some only on GPUs.

    Fix: Set optimizer.fused=null, which takes it where there is one.
    """
    config = draft.config
    spec = spec_of(config.optimizer)
    if not config.optimizer.fused or not config.trains_itself:
        return
    key = "optimizer.fused"
    if spec.fused_by is None:
        yield Problem(f"{key}=true: optimizer.kind={spec.name} has no fused kernel", f"{key}=null")
    elif config.offload.optimizer is not OffloadDevice.none:
        yield warning_problem(
            f"{key}=true is for a device, and the optimizer is in host memory", f"{key}=null"
        )
    elif spec.fused_by is Maker.deepspeed and draft.hardware.accelerator is Accelerator.cpu:
        yield Problem(
            f"{key}=true: {spec.name.title()}'s kernel is a GPU's, the hardware is cpu",
            f"{key}=null",
        )


on_json(
    "TC039",
    json_optimizer.muon_sees_whole_gradients,
    arguments="recipe=tiny zero_stage=3 optimizer=muon script=train.py",
    files={"train.py": ""},
)


on_json(
    "TC055",
    json_optimizer.lamb_has_adaptive_loss_scale,
    arguments="recipe=tiny optimizer=lamb precision=fp16 precision.loss_scale=128 script=train.py",
    files={"train.py": ""},
)


on_json(
    "TC056",
    json_optimizer.the_optimizer_has_a_kernel,
    arguments="recipe=tiny optimizer=lion script=train.py",
    files={"train.py": ""},
)

KEY = "objective.kind"


@rule("TC392", "*", example="recipe=tiny objective=dpo parallelism.sequence=2")
def objective_goes_with_the_rest(draft: Draft) -> Iterator[Problem]:
    """An objective over whole samples has them on one rank.

    DPO and its like compare log-probabilities of whole answers, which a rank of the sequence or
    context axis or a pipeline stage does not have; distillation compares token by token, and goes
    with both axes. A head of its own, as of reward and classify, is new, so it
    trains, and it is that of a class of transformers.

    Fix: Use data and tensor parallelism, or objective=next_token.
    """
    config = draft.config
    spec = objective_of(config.objective)
    if not spec.build or not config.trains_itself:
        return
    what, instead = f"{KEY}={spec.name}", "objective=next_token"
    limits = [*OBJECTIVE_LIMITS, *(HEAD_LIMITS if spec.head is not None else ())]
    if spec.whole_samples:
        axes = ("parallelism.sequence", "parallelism.context")
        limits += (only_value(key, 1, spec.whole_samples) for key in axes)
    yield from limit_problems(config, limits, what, instead)
    weights = {"auxiliary_loss": auxiliary_loss(config), "z_loss": config.experts.z_loss}
    for name, weight in weights.items():
        if weight > 0 and (config.model.num_experts or 1) > 1:
            key = f"experts.{name}"
            message = f"{key}={weight:g} with {what}: it is weighted by tokens"
            yield Problem(message, f"{key}=0, or {instead}", key=key)


def _trains_the_head(config: RunConfig) -> bool:
    model = config.model
    is_unknown = model.factory is not None or model.is_unread
    return is_unknown or f"{SCORE}.weight" not in frozen_names(config)


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
    """An objective takes one kind of samples, and the data source gives that kind.

    A preference is between two answers to one prompt, a reward model's label is of one answer, and
    so on. Data of another kind lacks what the loss compares, or has what it must not learn. The
    documents of a record must not see each other, and none may be cut off.

    Fix: Use a data source whose samples the objective takes, such as data=preferences with
    objective=dpo.
    """
    config = draft.config
    if not config.trains_itself:
        return
    takes = objective_of(config.objective).takes
    for at, section in keyed_sources(config.data).items():
        if config.data.factory is not None and takes is not SampleKind.text:
            yield Problem(
                f"data.factory={config.data.factory} with {KEY}={config.objective.kind}: a "
                f"function gives {SampleKind.text}, and the objective takes {takes}",
                f"data.factory=null, with the files of {takes} in data.paths",
                key="data.factory",
            )
        elif (gives := data_spec_of(section).gives) is not takes:
            others = [each.name for each in load_specs("data") if each.gives is takes]
            named = "chat" if takes is SampleKind.text else " or ".join(others)
            objectives = [each.name for each in load_specs("objective") if each.takes is gives]
            yield Problem(
                f"{at}.kind={section.kind} gives {gives}, and {KEY}={config.objective.kind} takes "
                f"{takes}",
                f"{at}.kind={named}; or objective={' or '.join(objectives)}",
                key=f"{at}.kind",
            )
    if takes is not SampleKind.text:
        yield from _unsafe_records(config)


def _unsafe_records(config: RunConfig) -> Iterator[Problem]:
    """Yield settings with which a record would not be one sample, whole and by itself."""
    what = f"{KEY}={config.objective.kind}"
    if config.data.sources:
        yield Problem(
            f"data.sources with {what}: the reference, the classes and the form of prompts are "
            "those of one source",
            "name all files in data.paths",
            key="data.sources",
        )
    if not config.data.mask_documents:
        yield Problem(
            f"data.mask_documents=false with {what}: a document of a record would see the one "
            "before it",
            "data.mask_documents=true",
            key="data.mask_documents",
        )
    if config.data.on_too_long is OnTooLong.cut:
        yield Problem(
            f"data.on_too_long=cut with {what}: the end of a record would be missing",
            "data.on_too_long=drop or error",
            key="data.on_too_long",
        )


@rule(
    "TC470",
    "objective.top_k",
    "data.kind",
    "*.fim_rate",
    example="recipe=tiny objective=distill objective.top_k=100000",
)
def teacher_is_stored_once(draft: Draft) -> Iterator[Problem]:
    """A teacher's log-probabilities are of tokens and samples that stay the same.

    They are stored once for each sample. So a sample may not change from epoch to epoch (infilling)
    or be fetched while training (data=stream), and there are at most as many tokens as the
    vocabulary has.

    Fix: Use data whose samples stay, and a smaller objective.top_k.
    """
    config, objective = draft.config, draft.config.objective
    if not isinstance(objective, DistillConfig) or not config.trains_itself:
        return
    if objective.top_k > config.model.vocab_size:
        yield Problem(
            f"objective.top_k={objective.top_k:,} is more than model.vocab_size="
            f"{config.model.vocab_size:,}",
            f"objective.top_k={config.model.vocab_size} stores whole distributions",
        )
    for at, section in keyed_sources(config.data).items():
        if isinstance(section, StreamConfig):
            yield Problem(
                f"{at}.kind=stream with {KEY}=distill: the teacher reads all samples before the "
                "first step",
                "prepare the same files on a disk (data=files)",
                key=f"{at}.kind",
            )
        elif section.fim_rate:
            yield Problem(
                f"{at}.fim_rate={section.fim_rate:g} with {KEY}=distill: infilling makes other "
                "samples in each epoch",
                f"{at}.fim_rate=0",
                key=f"{at}.fim_rate",
            )


@rule("TC472", "*", example="recipe=tiny objective=multi_token parallelism.tensor=2")
def future_blocks_go_with_the_rest(draft: Draft) -> Iterator[Problem]:
    """Blocks that predict further tokens stand behind the last one on every rank.

    They are built of the family's own block and norms, and have been verified with data
    parallelism, ZeRO and recomputation, with the plain loss.

    Fix: Use a llama, mistral or qwen3 and leave the other settings as they are by default.
    """
    config = draft.config
    if config.model.future_blocks is None or not config.trains_itself:
        return
    what = f"{KEY}={config.objective.kind}"
    model = model_of(config.model)
    if not config.model.has_closed_form or not model.is_rotary:
        yield Problem(
            f"model.family={config.model.family} with {what}: how a block of it is built apart is "
            "not known",
            "a model of the families llama, mistral or qwen3",
            key="model.family",
        )
    yield from limit_problems(config, FUTURE_LIMITS, what, "objective=next_token")


NEXT_TOKEN_LIMITS = (
    only_value("parallelism.pipeline", 1, "the loss of a last stage is that of the next token"),
    only_value(
        "kernels.cross_entropy",
        CrossEntropyKind.plain,
        "it sums the losses of the next tokens, and no others",
        "kernels.cross_entropy=plain",
    ),
    only_value("stability.z_loss", 0, "it is a part of the next token's loss"),
)
"""Settings of losses that know next tokens alone."""

FUTURE_LIMITS = (
    only_value("engine.kind", "deepspeed", "its blocks are divided as units", "engine=deepspeed"),
    only_value("parallelism.tensor", 1, "the blocks are not split"),
    only_value("parallelism.sequence", 1, "a rank lacks the tokens behind its part"),
    only_value("parallelism.context", 1, "a rank lacks the tokens behind its chunks"),
    *NEXT_TOKEN_LIMITS,
    only_value(
        "kernels.compile",
        CompileKind.none,
        "compiled blocks call no hooks, by which further blocks get the mask of the last one",
    ),
    only_value("adapter.kind", "none", "new blocks do not train with an adapter", "adapter=none"),
    only_value("training.freeze", [], "new blocks are tested beside weights that all train"),
    only_value("model.mup", False, "there is no factor for the blocks behind the last one"),
)
"""Settings that further blocks have been verified with."""

OBJECTIVE_LIMITS = (
    *NEXT_TOKEN_LIMITS,
    never_value(
        "kernels.compile",
        CompileKind.deepcompile,
        "its graph is tested with the next token's loss alone",
        "kernels.compile=none",
    ),
)
"""Settings that objectives with a loss of their own have been verified with."""

HEAD_LIMITS = (
    only_value(
        "model.factory",
        None,
        f"the head `{SCORE}` is one of transformers' classes",
        "model=hf, or a family of trainctl's",
    ),
    Limit(
        key="training.freeze",
        holds=_trains_the_head,
        why="the head is new, and the other weights do not know it",
        nearest="training.freeze=[model]",
    ),
)
"""Settings that a new head can be trained with."""


@rule(
    "TC473",
    "objective.class_weights",
    example="recipe=classify-tiny 'objective.class_weights=[1, 2, 0.5]'",
)
def classes_have_a_weight_each(draft: Draft) -> Iterator[Problem]:
    """Every class has a weight of 0 or more, or none has one.

    The loss of a text is multiplied by the weight of its class: a list of another length leaves
    classes without one, and a negative weight teaches the opposite of a label.

    Fix: Give objective.class_weights one number for each of objective.outputs, or leave it out.
    """
    objective = draft.config.objective
    if not isinstance(objective, ClassifyConfig) or not objective.class_weights:
        return
    weights, outputs = objective.class_weights, objective.outputs
    if len(weights) != outputs:
        fitting = f"objective.outputs={len(weights)}, or " if len(weights) > 1 else ""
        yield Problem(
            f"objective.class_weights has {len(weights)} numbers, and objective.outputs={outputs}",
            f"{fitting}a weight for each of {outputs} classes",
        )
    wrong = [weight for weight in weights if not 0 <= weight < math.inf]
    if wrong:
        yield Problem(
            f"objective.class_weights has {wrong[0]:g}, and a weight is 0 or more",
            "0 leaves texts of a class out of the loss",
        )


@rule(
    "TC516",
    "objective.mask_share",
    "objective.random_share",
    example="recipe=tiny objective=masked objective.random_share=0.3",
)
def shares_of_hidden_tokens_fit(draft: Draft) -> Iterator[Problem]:
    """Mask tokens and random tokens replace no more than all hidden tokens.

    The rest of the hidden tokens stays as it is. Shares above 1 would leave fewer random tokens
    than objective.random_share says.

    Fix: Use shares with a sum of 1 at most.
    """
    section = draft.config.objective
    if isinstance(section, MaskedConfig) and section.mask_share + section.random_share > 1:
        yield Problem(
            f"objective.mask_share={section.mask_share:g} and objective.random_share="
            f"{section.random_share:g} are more than all hidden tokens",
            f"objective.random_share={1 - section.mask_share:g}",
            key="objective.random_share",
        )


@rule(
    "TC490",
    "objective.rewards",
    "objective.rewards.*",
    "objective.rewards.*.call",
    example="recipe=tiny objective=grpo 'objective.rewards={form: {kind: regex}}'",
)
def rewards_can_be_computed(draft: Draft) -> Iterator[Problem]:
    """An objective of rewards has some, and each has what it computes with.

    A reward without its pattern, function or length, or whose file cannot be read, would fail for
    every answer.

    Fix: Set the key that the message names.
    """
    objective = draft.config.objective
    if not isinstance(objective, RewardsConfig):
        return
    if not objective.rewards:
        yield Problem(
            f"{KEY}={objective.kind} learns from rewards, and objective.rewards has none",
            "objective.rewards={exact_answer: {}} compares answers with the records' `answer`",
        )
    for name, reward in objective.rewards.items():
        key, build = f"objective.rewards.{name}", load_spec("reward", reward.kind).build
        if isinstance(reward, FunctionRewardConfig) and not reward.call:
            hint = f"{key}.call=module:function"
            yield Problem(f"{key} names no function", hint, key=f"{key}.call")
        if callable(build):
            with suppress(ImportError):  # reported with the packages
                try:
                    build(reward)
                except TrainctlError as error:
                    yield Problem(f"{key}: {error.message}", error.hint, key=key)
