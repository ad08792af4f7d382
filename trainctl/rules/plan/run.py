"""Rules about the model's shape, the data, checkpoints, and the launcher."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import WeightsKind
from trainctl.errors import Finding
from trainctl.options import launcher as launchers
from trainctl.options import model as families
from trainctl.options import tokenizer as tokenizers
from trainctl.options.optimizer import spec_of
from trainctl.plan import average
from trainctl.rules.plan.draft import Draft, choices, error, nearest_multiples, warning

METRICS = ("loss", average.METRIC)
"""Metrics that an evaluation measures."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""Log levels that DeepSpeed accepts (utils/logging.py)."""


def model_has_its_directory(draft: Draft) -> Iterator[Finding]:
    """The family hf is whatever a directory says."""
    model = draft.config.model
    if model.is_directory and model.path is None:
        yield error(
            "model.path",
            f"model.family={model.family} needs model.path, a transformers directory with "
            "config.json",
            "model.path=/path/to/model",
        )


def weights_have_one_source(draft: Draft) -> Iterator[Finding]:
    """Weights of step 0 are random, or those of a directory."""
    kind, folder = draft.config.model.weights, draft.config.model.initial_weights
    if kind is WeightsKind.random and folder is not None:
        yield error(
            "model.weights",
            f"model.weights=random, and model.initial_weights={folder} names others",
            "leave one of them out",
        )


def model_has_a_shape(draft: Draft) -> Iterator[Finding]:
    """No size is 0, which stands for one that a directory or a function of the user's gives."""
    config = draft.config
    if not config.model.has_closed_form:
        return
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
        if getattr(config.model, name) == 0:
            yield error(
                f"model.{name}", f"model.{name}=0: no model has that", f"model.{name}=1 at least"
            )


def heads_share_the_width(draft: Draft) -> Iterator[Finding]:
    """Without head_dim the heads divide the width; key-value heads divide the query heads."""
    model = draft.config.model
    if model.factory is not None:
        return  # the user's function divides the width
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if model.head_dim is None and model.hidden_size % heads:
        yield error(
            "model.hidden_size",
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={heads}",
            f"{choices(nearest_multiples(model.hidden_size, heads), 'model.hidden_size')}, "
            "or set model.head_dim",
        )
    if kv_heads is not None and heads % kv_heads:
        yield error(
            "model.num_key_value_heads",
            f"model.num_key_value_heads={kv_heads} does not divide "
            f"model.num_attention_heads={heads}",
            f"model.num_key_value_heads={heads}",
        )
    if not families.spec_of(model).has_equal_heads:
        return
    if kv_heads not in (None, heads):
        yield error(
            "model.num_key_value_heads",
            f"model.num_key_value_heads={kv_heads}: {model.family} has no grouped-query attention",
            "leave it out",
        )
    if model.head_dim not in (None, model.hidden_size // heads):
        yield error(
            "model.head_dim",
            f"model.head_dim={model.head_dim}: {model.family}'s heads share model.hidden_size="
            f"{model.hidden_size} evenly",
            f"model.head_dim={model.hidden_size // heads}, or leave it out",
        )


def vocabulary_holds_the_tokenizer(draft: Draft) -> Iterator[Finding]:
    """Every id of a tokenizer without a file has a row in the embedding; 0 is not known yet."""
    rows, tokenizer = draft.config.model.vocab_size, draft.config.tokenizer
    spec = tokenizers.spec_of(tokenizer)
    ids = spec.facts(tokenizer).vocab_size if spec.file is None else 0
    if 0 < rows < ids:
        yield error(
            "model.vocab_size",
            f"model.vocab_size={rows} is smaller than the {spec.name} tokenizer's {ids} ids",
            f"model.vocab_size={ids} or more",
        )


def best_is_measured(draft: Draft) -> Iterator[Finding]:
    """The best checkpoint is chosen by a metric of the evaluation."""
    best_of = draft.config.checkpoint.best_of
    if best_of == average.METRIC and draft.config.training.ema_decay is None:
        yield error(
            "checkpoint.best_of",
            f"checkpoint.best_of={best_of} is of the average of the weights, and none is kept",
            "training.ema_decay=0.999",
        )
    elif best_of is not None and best_of not in METRICS:
        yield error(
            "checkpoint.best_of",
            f"checkpoint.best_of={best_of} is no metric of an evaluation",
            f"checkpoint.best_of={METRICS[0]}",
        )


def average_can_be_kept(draft: Draft) -> Iterator[Finding]:
    """The average of the weights lies beside fp32 master weights, and changes places with them."""
    config = draft.config
    hindrance = average.average_conflict(config) if config.trains_itself else None
    if config.training.ema_decay is None or hindrance is None:
        return
    setting, why = hindrance
    yield error(
        "training.ema_decay",
        f"training.ema_decay={config.training.ema_decay:g} with {setting}: {why}",
        f"leave {setting.partition('=')[0]} out, or training.ema_decay=null",
    )


def weights_are_saved_before_the_end(draft: Draft) -> Iterator[Finding]:
    """An interval that is longer than the run saves nothing."""
    every, steps = draft.config.checkpoint.weights_only_every_steps, draft.total_steps
    if every is not None and steps is not None and every > steps:
        yield warning(
            "checkpoint.weights_only_every_steps",
            f"checkpoint.weights_only_every_steps={every} saves nothing in {steps} steps",
            f"checkpoint.weights_only_every_steps={steps}",
        )


def something_is_saved(draft: Draft) -> Iterator[Finding]:
    """A run that saves nothing can only be started again."""
    settings = draft.config.checkpoint
    if not settings.saves_something:
        lost = settings.weights_only_every_steps is None
        yield warning(
            "checkpoint.at_end",
            "no checkpoint is ever saved: the run cannot be resumed, and its model is lost"
            if lost
            else "only weights are saved: the run cannot be resumed",
            "checkpoint.every_steps=100, checkpoint.every_minutes=30 or checkpoint.at_end=true",
        )


def launcher_names_are_valid(draft: Draft) -> Iterator[Finding]:
    """What a launcher gives to another program as a name is nothing that it reads otherwise."""
    section = draft.config.launcher
    spec = launchers.spec_of(section)
    if spec.bad_names is not None:
        yield from (error(*problem) for problem in spec.bad_names(section))


def log_level_is_known(draft: Draft) -> Iterator[Finding]:
    """A level that DeepSpeed's logger has."""
    level = draft.config.logging.deepspeed_level
    if level not in LOG_LEVELS:
        yield error(
            "logging.deepspeed_level",
            f"logging.deepspeed_level={level} is not a log level",
            f"one of {', '.join(LOG_LEVELS)}",
        )


def profiler_has_a_window(draft: Draft) -> Iterator[Finding]:
    """The profiler records from a first to a last step of the run, on ranks that there are."""
    steps, ranks = draft.config.logging.profile_steps, draft.config.logging.profile_ranks
    if not steps:
        return
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        first = max(1, min(steps))
        yield error(
            "logging.profile_steps",
            f"logging.profile_steps={steps} is not a first and a last step, counted from 1",
            f"logging.profile_steps=[{first},{max(first, *steps)}]",
        )
    elif draft.total_steps is not None and steps[0] > draft.total_steps:
        yield warning(
            "logging.profile_steps",
            f"logging.profile_steps={steps} lies behind the run's last step, {draft.total_steps}: "
            "nothing will be recorded",
            f"logging.profile_steps=[{draft.total_steps},{draft.total_steps}]",
        )
    world_size = draft.mesh.world_size if draft.mesh else None
    if not ranks or min(ranks) < 0 or (world_size is not None and max(ranks) >= world_size):
        yield error(
            "logging.profile_ranks",
            f"logging.profile_ranks={ranks} names no rank, or one that is not there"
            + (f": the plan has {world_size}, from 0" if world_size else ""),
            "logging.profile_ranks=[0]",
        )


def factored_states_stay_factored(draft: Draft) -> Iterator[Finding]:
    """ZeRO hands the optimizer flat vectors, and only matrices have factors."""
    config = draft.config
    if config.trains_itself:
        return  # trainctl's adafactor knows the matrix of each flat piece
    if spec_of(config.optimizer).has_factored_states and config.zero_stage.stage > 0:
        yield warning(
            "optimizer.kind",
            f"optimizer.kind={config.optimizer.kind} at ZeRO stage {config.zero_stage.stage} "
            "updates flat partitions: its second moment is whole, and saves no memory",
            "zero_stage=0, or optimizer=adamw_8bit",
        )
