"""Rules about the processing of gradients before the update."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import AdaptiveClipping, CompileKind, OnBadLoss, RunConfig
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule


@rule(
    "TC069",
    "gradients.*",
    "stability.*",
    "optimizer.groups",
    example="recipe=tiny kernels.compile=deepcompile gradients.clip_value=1.0",
)
def gradients_are_seen(draft: Draft) -> Iterator[Problem]:
    """Gradients are visible to the trainer where a setting processes them.

    To clip by value, add noise, judge a norm or drop a step, the trainer needs the gradient before
    its update. DeepCompile, SuperOffload and ZenFlow reduce and apply it inside.

    Fix: Keep the technique or the speed-up, not both.
    """
    config = draft.config
    if not config.trains_itself:
        return
    hidden = _who_hides_gradients(config)
    if hidden is None:
        return
    setting, why = hidden
    for key, value in _needs_gradients(config):
        left_out = setting.partition("=")[0]
        yield Problem(f"{key}={value} with {setting}: {why}", f"leave {left_out} out", key=key)


@rule(
    "TC093",
    "stability.on_bad_loss",
    example="recipe=tiny stability.on_bad_loss=rewind checkpoint.every_steps=null",
)
def rewinding_has_a_checkpoint(draft: Draft) -> Iterator[Problem]:
    """stability.on_bad_loss=rewind has checkpoints during the run.

    A rewind goes back to the newest checkpoint. Without one on the way there is nothing to go back
    to, and the first spike would stop the run.

    Fix: Set checkpoint.every_steps or every_minutes; a rewind costs as much as lies between
    checkpoints.
    """
    config = draft.config
    every = (config.checkpoint.every_steps, config.checkpoint.every_minutes)
    if config.stability.on_bad_loss is OnBadLoss.rewind and every == (None, None):
        yield Problem(
            "stability.on_bad_loss=rewind, but no checkpoint is saved before the end",
            "checkpoint.every_steps=100",
        )


def _who_hides_gradients(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that hides the gradients from the trainer, and the reason, or None."""
    if config.offload.super_offload:
        return (
            "offload.super_offload=true",
            "another process has the gradients, and updates while the backward pass goes on",
        )
    if config.offload.zenflow:
        return (
            "offload.zenflow=true",
            "the columns that matter most are updated while the backward pass goes on",
        )
    if config.kernels.compile is CompileKind.deepcompile:
        return (
            "kernels.compile=deepcompile",
            "the compiled graph reduces the gradients in buffers of its own",
        )
    return None


def _needs_gradients(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the keys, with their values, of features that need the gradients."""
    gradients, stability = config.gradients, config.stability
    if gradients.clip_value > 0:
        yield "gradients.clip_value", gradients.clip_value
    if gradients.adaptive_clipping is not AdaptiveClipping.none:
        yield "gradients.adaptive_clipping", gradients.adaptive_clipping.value
    if gradients.centralize:
        yield "gradients.centralize", "true"
    if gradients.noise > 0:
        yield "gradients.noise", gradients.noise
    if any(entry.gradient_clipping for entry in config.optimizer.groups):
        yield "optimizer.groups", "[...] with gradient_clipping"
    if stability.on_bad_loss not in (OnBadLoss.stop, OnBadLoss.warn):
        yield "stability.on_bad_loss", stability.on_bad_loss.value
    if stability.norm_spike_factor is not None:
        yield "stability.norm_spike_factor", stability.norm_spike_factor
    if stability.norm_limit is not None:
        yield "stability.norm_limit", stability.norm_limit
