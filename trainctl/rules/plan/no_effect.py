"""Rule about settings that differ from their default and have no effect in this plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.keys import as_written
from trainctl.config.registry import load_spec, load_specs
from trainctl.config.schema import (
    Accelerator,
    AdaptiveClipping,
    CrossEntropyKind,
    DataFromPaths,
    LrScaling,
    OffloadDevice,
    OnBadLoss,
    RunConfig,
    ScheduleConfig,
    walk_leaves,
)
from trainctl.config.sections import callbacks_of
from trainctl.options import model
from trainctl.options.engine import engine_of
from trainctl.options.model import Family
from trainctl.options.schedule import spec_of
from trainctl.plans.deepspeed_table import ZERO_KEYS, ineffective_keys
from trainctl.plans.derive import is_counted_in_epochs
from trainctl.plans.gathering import is_gathered_by_trainctl
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule

Condition = Callable[[RunConfig], bool]


def _looks_for_spikes(config: RunConfig) -> bool:
    stability = config.stability
    return stability.spike_factor is not None or stability.norm_spike_factor is not None


def _counts_in_unit(schedule: ScheduleConfig) -> bool:
    return any(getattr(schedule, name) for name in spec_of(schedule).in_unit)


def _has_a_limit(config: RunConfig) -> bool:
    stability = config.stability
    return stability.loss_limit is not None or stability.norm_limit is not None


DEEPSPEED = "engine=deepspeed"

NEEDS: tuple[tuple[tuple[str, ...], Condition, str], ...] = (
    (("model.path",), lambda c: c.model.is_directory or c.model.model_type is not None, "model=hf"),
    (
        (
            "model.attention",
            "model.head_dim",
            "model.intermediate_size",
            "model.norm_epsilon",
            "model.num_attention_heads",
            "model.num_key_value_heads",
            "model.rope_theta",
            "model.sliding_window",
            "model.trust_remote_code",
        ),
        lambda c: not c.model.is_module,
        "a model of transformers: a module has arguments of its own, model.arguments",
    ),
    (("model.mup_base_width", "model.mup_base_head_dim"), lambda c: c.model.mup, "model.mup=true"),
    (
        (
            "experts.auxiliary_loss",
            "experts.z_loss",
            "experts.bias_update_rate",
            "experts.expected_load",
        ),
        lambda c: (c.model.num_experts or 1) > 1 or c.model.factory is not None,
        "a model with experts",
    ),
    (
        ("optimizer.decay_embeddings",),
        lambda c: c.optimizer.weight_decay > 0,
        "optimizer.weight_decay above 0",
    ),
    (
        ("schedule.unit",),
        lambda c: bool(c.training.batch_ramp) or _counts_in_unit(c.schedule),
        "training.batch_ramp, without which tokens are proportional to steps",
    ),
    (
        ("optimizer.groups", "optimizer.layer_lr_decay", "optimizer.fused"),
        lambda c: c.trains_itself,
        "trainctl's trainer: a program of your own makes its groups",
    ),
    (
        (
            "gradients.centralize",
            "gradients.clip_value",
            "gradients.noise",
            "gradients.adaptive_clipping",
            "stability.spike_factor",
            "stability.norm_spike_factor",
            "stability.loss_limit",
            "stability.norm_limit",
            "stability.z_loss",
            "training.batch_ramp",
            "training.deterministic",
            "training.ema_decay",
        ),
        lambda c: c.trains_itself,
        "trainctl's trainer: a program of your own does this itself",
    ),
    (("logging.deepspeed_level",), lambda c: engine_of(c).takes_json, DEEPSPEED),
    (
        ("zero_stage.gather",),
        is_gathered_by_trainctl,
        "zero_stage=3 and engine=deepspeed, with trainctl's trainer",
    ),
    (
        ("zero_stage.overlap_comm",),
        lambda c: c.zero_stage.stage >= 1 and c.parallelism.pipeline == 1,
        "ZeRO stage 1 or more, without pipeline stages",
    ),
    (
        ("offload.ratio",),
        lambda c: c.offload.optimizer is not OffloadDevice.none,
        "offload.optimizer=cpu",
    ),
    (
        ("checkpoint.weights_only_keep",),
        lambda c: c.checkpoint.weights_only_every_steps is not None,
        "checkpoint.weights_only_every_steps",
    ),
    (
        ("checkpoint.mirror",),
        lambda c: c.trains_itself,
        "trainctl's own trainer, whose checkpoints it copies",
    ),
    (
        ("checkpoint.asynchronous",),
        lambda c: c.offload.optimizer is not OffloadDevice.nvme,
        "an optimizer in memory: what is on NVMe is not copied, but written while training waits",
    ),
    (
        ("parallelism.stage_blocks", "parallelism.pipeline_schedule"),
        lambda c: c.parallelism.pipeline > 1,
        "parallelism.pipeline above 1",
    ),
    (
        ("parallelism.sequence_sharded_norms",),
        lambda c: c.parallelism.tensor > 1,
        "parallelism.tensor above 1",
    ),
    (("parallelism.pipeline_partition",), lambda c: c.parallelism.pipeline > 1, "pipeline stages"),
    (
        ("kernels.chunk_tokens",),
        lambda c: c.kernels.cross_entropy is CrossEntropyKind.chunked,
        "kernels.cross_entropy=chunked",
    ),
    (
        ("data.held_out_fraction",),
        lambda c: not (isinstance(c.data, DataFromPaths) and c.data.held_out_paths),
        "data.held_out_paths empty, which replaces it",
    ),
    (("training.tokens",), lambda c: c.training.steps is None, "training.steps=null"),
    (
        ("training.epochs",),
        lambda c: is_counted_in_epochs(c.training),
        "training.steps=null and training.tokens=null, which replace it",
    ),
    (
        ("training.epoch_tokens",),
        lambda c: is_counted_in_epochs(c.training),
        "training.epochs, with training.steps=null and training.tokens=null",
    ),
    (
        ("training.sample_tokens",),
        lambda c: c.model.score_outputs is None,
        "an output projection over the vocabulary: a head `score` gives no next token",
    ),
    (
        ("training.sample_prompt", "training.sample_prompts"),
        lambda c: c.training.sample_tokens > 0,
        "training.sample_tokens above 0",
    ),
    (
        ("training.evaluate_every_steps", "checkpoint.best_of"),
        lambda c: c.training.evaluation_samples > 0,
        "training.evaluation_samples above 0",
    ),
    (
        ("training.ema_every_steps",),
        lambda c: c.training.ema_decay is not None,
        "training.ema_decay",
    ),
    (
        ("training.stop_patience",),
        lambda c: c.training.evaluation_samples > 0 and c.training.evaluate_every_steps is not None,
        "training.evaluate_every_steps, and training.evaluation_samples above 0",
    ),
    (
        ("training.stop_min_delta",),
        lambda c: c.training.stop_patience is not None,
        "training.stop_patience",
    ),
    (
        ("logging.alerts.kinds", "logging.alerts.no_progress_minutes"),
        lambda c: bool(c.logging.alerts.urls or c.logging.alerts.command),
        "logging.alerts.urls or logging.alerts.command",
    ),
    (("logging.profile_ranks",), lambda c: bool(c.logging.profile_steps), "logging.profile_steps"),
    (
        ("stability.max_interventions",),
        lambda c: c.stability.on_bad_loss not in (OnBadLoss.stop, OnBadLoss.warn),
        "stability.on_bad_loss=skip_step, skip_batch or rewind",
    ),
    (
        ("stability.spike_window", "stability.spike_after_steps"),
        lambda c: _looks_for_spikes(c),
        "stability.spike_factor or stability.norm_spike_factor",
    ),
    (
        ("stability.on_bad_loss",),
        lambda c: (
            c.stability.on_bad_loss is not OnBadLoss.warn or _looks_for_spikes(c) or _has_a_limit(c)
        ),
        "to find something to warn of: stability.spike_factor, norm_spike_factor, loss_limit or "
        "norm_limit",
    ),
    (
        ("stability.rewind_lr_factor",),
        lambda c: c.stability.on_bad_loss is OnBadLoss.rewind,
        "stability.on_bad_loss=rewind",
    ),
    (
        ("optimizer.gradient_clipping",),
        lambda c: (
            not c.trains_itself or c.gradients.adaptive_clipping is not AdaptiveClipping.percentile
        ),
        "gradients.adaptive_clipping=none: the percentile takes its place",
    ),
    (
        ("optimizer.lr_scaling_batch_size",),
        lambda c: c.optimizer.lr_scaling is not LrScaling.none,
        "optimizer.lr_scaling=linear or sqrt",
    ),
    (
        ("gradients.adaptive_percentile",),
        lambda c: c.gradients.adaptive_clipping is AdaptiveClipping.percentile,
        "gradients.adaptive_clipping=percentile",
    ),
    (
        ("gradients.adaptive_factor",),
        lambda c: c.gradients.adaptive_clipping is AdaptiveClipping.mean,
        "gradients.adaptive_clipping=mean",
    ),
    (
        ("gradients.adaptive_window",),
        lambda c: c.gradients.adaptive_clipping is not AdaptiveClipping.none,
        "gradients.adaptive_clipping=percentile or mean",
    ),
    (("gradients.noise_decay",), lambda c: c.gradients.noise > 0, "gradients.noise above 0"),
    (
        ("launcher.plain_environment",),
        lambda c: bool(c.launcher.environment),
        "launcher.environment",
    ),
    (
        ("launcher.min_bandwidth_gb_per_second",),
        lambda c: c.launcher.benchmark,
        "launcher.benchmark=true",
    ),
)
"""Keys, the condition under which they have an effect, and the condition in words. Conditions
within one section are declared with the key (`option(needs=...)`); conditions of keys that only
DeepSpeed reads are in its table.
"""

OWN_RULES = {"offload.super_offload", *(key for keys, _, _ in NEEDS for key in keys)}
"""Keys of DeepSpeed's table that have another condition here or a rule of their own."""

BUFFERS = tuple(row.source for row in ZERO_KEYS if row.source not in OWN_RULES)
"""Keys of DeepSpeed's ZeRO buffers and communication, which no other engine has."""

FAMILIES: tuple[tuple[tuple[str, ...], Callable[[Family], bool]], ...] = (
    (
        (
            "model.trust_remote_code",
            "model.anatomy",
            "model.num_experts",
            "model.experts_per_token",
            "model.router_aux_loss_coef",
        ),
        lambda family: family.is_directory,
    ),
    (("model.sliding_window",), lambda family: family.has_window),
    (("model.rope_theta",), lambda family: family.is_rotary),
)
"""Keys of the model's shape, with the condition on the families in which they have an effect."""


@rule("TC099", "*", severity=WARNING, example="recipe=tiny experts.z_loss=0.1")
def settings_have_an_effect(draft: Draft) -> Iterator[Problem]:
    """Every setting has an effect in this plan.

    The setting is read by nobody in this plan: what would read it is switched off. It was typed for
    a reason, which is not met.

    Fix: Leave it out, or switch on what the message names.
    """
    config = draft.config
    changed = {
        key: (item, value) for key, item, value in walk_leaves(config) if value != _default(item)
    }
    idle = [
        (key, words)
        for keys, has_effect, words in NEEDS
        if not has_effect(config)
        for key in keys
        if key in changed
    ]
    idle += [
        (key, _families_with(has))
        for keys, has in FAMILIES
        if config.model.factory is None and not has(model.spec_of(config.model))
        for key in keys
        if key in changed
    ]
    idle += [
        (key, words) for key, words in ineffective_keys(config) if key in changed.keys() - OWN_RULES
    ]
    if not engine_of(config).takes_json:
        refused = {limit.key for limit in engine_of(config).limits}
        idle += [(key, DEEPSPEED) for key in BUFFERS if key in changed.keys() - refused]
    for key, (item, _) in changed.items():
        needs = item.metadata.get("needs")
        group, *part, _ = key.split(".") if "." in key else (key, "")
        if part and part[0] not in ("alerts", *config.logging.to):
            idle.append((key, f"{part[0]} in logging.to"))
        if needs is not None and not needs[0](getattr(config, group)):
            idle.append((key, needs[1]))
    for key, words in idle:
        value = as_written(to_plain(changed[key][1]))
        yield Problem(f"{key}={value} has no effect: it needs {words}", f"leave {key} out", key=key)
    for name in callbacks_of(config):
        if load_spec("callbacks", name).needs_gpu and draft.hardware.accelerator is Accelerator.cpu:
            yield Problem(
                f"the callback {name} has no effect on a CPU: it needs a GPU",
                f"leave {name} out of `callbacks`",
                key=f"callbacks.{name}",
            )


def _families_with(has: Callable[[Family], bool]) -> str:
    """Return in words the families that satisfy `has`, or all but the others if that is shorter."""
    shaped = model.families()
    having = [spec.name for spec in shaped if has(spec)]
    others = [spec.name for spec in shaped if not has(spec)]
    if len(others) < len(having):
        return f"another family than {' and '.join(others)}"
    everyone = having or [spec.name for spec in load_specs("model") if has(spec)]
    return f"model.family={' or '.join(everyone)}"


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default
