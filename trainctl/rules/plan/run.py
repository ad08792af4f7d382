"""Rules about the model's shape, the data, checkpoints, and the launcher."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import WeightsKind
from trainctl.options import launcher as launchers
from trainctl.options import model as families
from trainctl.options import tokenizer as tokenizers
from trainctl.options.optimizer import spec_of
from trainctl.plan import average
from trainctl.plan.nearest import choices, nearest_multiples
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule, warning

METRICS = ("loss", average.METRIC)
"""Metrics that an evaluation measures."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""Log levels that DeepSpeed accepts (utils/logging.py)."""


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


@rule("TC075", "checkpoint.best_of", example="recipe=tiny checkpoint.best_of=accuracy")
def best_is_measured(draft: Draft) -> Iterator[Problem]:
    """The best checkpoint is chosen by a metric that the evaluation measures.

    The best checkpoint is the one with the lowest value of a metric of the evaluation, which has to
    be measured.

    Fix: Set checkpoint.best_of=loss, with training.evaluate_every_steps.
    """
    best_of = draft.config.checkpoint.best_of
    if best_of == average.METRIC and draft.config.training.ema_decay is None:
        yield Problem(
            f"checkpoint.best_of={best_of} is of the average of the weights, and none is kept",
            "training.ema_decay=0.999",
        )
    elif best_of is not None and best_of not in METRICS:
        yield Problem(
            f"checkpoint.best_of={best_of} is no metric of an evaluation",
            f"checkpoint.best_of={METRICS[0]}",
        )


@rule(
    "TC028",
    "training.ema_decay",
    example="recipe=tiny zero_stage=3 training.ema_decay=0.99 offload.optimizer=nvme "
    "offload.nvme_path=/local_nvme",
)
def average_can_be_kept(draft: Draft) -> Iterator[Problem]:
    """A moving average of the weights has fp32 master weights that it can be swapped with.

    The moving average is one more copy beside the fp32 master weights, on the device or in host
    memory; evaluation swaps the two. DeepSpeed's swapper to NVMe knows Adam's tensors only.

    Fix: Use offload=cpu in place of NVMe, or training.ema_decay=null.
    """
    config = draft.config
    hindrance = average.average_conflict(config) if config.trains_itself else None
    if config.training.ema_decay is None or hindrance is None:
        return
    setting, why = hindrance
    yield Problem(
        f"training.ema_decay={config.training.ema_decay:g} with {setting}: {why}",
        f"leave {setting.partition('=')[0]} out, or training.ema_decay=null",
    )


@rule(
    "TC040",
    "checkpoint.weights_only_every_steps",
    severity=WARNING,
    example="recipe=tiny checkpoint.weights_only_every_steps=200",
)
def weights_are_saved_before_the_end(draft: Draft) -> Iterator[Problem]:
    """The interval of weights-only saves is not longer than the run.

    Weights were to be saved beside the checkpoints, and the run ends before the first time.

    Fix: Use a shorter interval, or leave it out.
    """
    every, steps = draft.config.checkpoint.weights_only_every_steps, draft.total_steps
    if every is not None and steps is not None and every > steps:
        yield Problem(
            f"checkpoint.weights_only_every_steps={every} saves nothing in {steps} steps",
            f"checkpoint.weights_only_every_steps={steps}",
        )


@rule(
    "TC076",
    "checkpoint.at_end",
    severity=WARNING,
    example="recipe=tiny checkpoint.at_end=false checkpoint.every_steps=null",
)
def something_is_saved(draft: Draft) -> Iterator[Problem]:
    """A run saves a checkpoint that it can be resumed from.

    A run that saves nothing can only be started again from step 0, and leaves no model.

    Fix: Set checkpoint.every_steps, every_minutes or at_end.
    """
    settings = draft.config.checkpoint
    if not settings.saves_something:
        lost = settings.weights_only_every_steps is None
        yield Problem(
            "no checkpoint is ever saved: the run cannot be resumed, and its model is lost"
            if lost
            else "only weights are saved: the run cannot be resumed",
            "checkpoint.every_steps=100, checkpoint.every_minutes=30 or checkpoint.at_end=true",
        )


@rule(
    "TC089",
    "launcher.*",
    example="recipe=tiny launcher=ssh \"launcher.hosts=['-oProxyCommand=id']\"",
)
def launcher_names_are_valid(draft: Draft) -> Iterator[Problem]:
    """Names that a launcher passes to other programs cannot be read as options or commands.

    A host, an interface or a partition is handed to ssh, srun or mpirun. A name that begins with a
    dash, or holds what a shell reads, would be an option or a command there.

    Fix: Use letters, digits, dots and dashes.
    """
    section = draft.config.launcher
    spec = launchers.spec_of(section)
    if spec.bad_names is not None:
        for key, message, hint in spec.bad_names(section):
            yield Problem(message, hint, key)


@rule("TC078", "logging.deepspeed_level", example="recipe=tiny logging.deepspeed_level=loud")
def log_level_is_known(draft: Draft) -> Iterator[Problem]:
    """logging.deepspeed_level is a log level.

    DeepSpeed looks the level up by name and fails at the start for one that it does not know.

    Fix: Choose debug, info, warning, error or critical.
    """
    level = draft.config.logging.deepspeed_level
    if level not in LOG_LEVELS:
        yield Problem(
            f"logging.deepspeed_level={level} is not a log level", f"one of {', '.join(LOG_LEVELS)}"
        )


@rule(
    "TC080",
    "logging.profile_steps",
    "logging.profile_ranks",
    example="recipe=tiny logging.profile_steps=[3]",
)
def profiler_has_a_window(draft: Draft) -> Iterator[Problem]:
    """The profiler records steps of the run, on ranks that exist.

    The profiler records a window of steps on named ranks; one outside the run writes nothing.

    Fix: Set logging.profile_steps=[FIRST,LAST], counted from 1, late enough that the first steps
    are over.
    """
    steps, ranks = draft.config.logging.profile_steps, draft.config.logging.profile_ranks
    if not steps:
        return
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        first = max(1, min(steps))
        yield Problem(
            f"logging.profile_steps={steps} is not a first and a last step, counted from 1",
            f"logging.profile_steps=[{first},{max(first, *steps)}]",
        )
    elif draft.total_steps is not None and steps[0] > draft.total_steps:
        yield warning(
            f"logging.profile_steps={steps} lies behind the run's last step, {draft.total_steps}: "
            "nothing will be recorded",
            f"logging.profile_steps=[{draft.total_steps},{draft.total_steps}]",
        )
    world_size = draft.mesh.world_size if draft.mesh else None
    if not ranks or min(ranks) < 0 or (world_size is not None and max(ranks) >= world_size):
        yield Problem(
            f"logging.profile_ranks={ranks} names no rank, or one that is not there"
            + (f": the plan has {world_size}, from 0" if world_size else ""),
            "logging.profile_ranks=[0]",
            key="logging.profile_ranks",
        )


@rule(
    "TC079",
    "optimizer.kind",
    severity=WARNING,
    example="recipe=tiny optimizer=adafactor script=train.py",
    files={"train.py": ""},
)
def factored_states_stay_factored(draft: Draft) -> Iterator[Problem]:
    """Factored optimizer states are used without ZeRO.

    Adafactor saves memory by keeping row and column sums of matrices. ZeRO 1 to 3 hands a script's
    optimizer flat vectors, which have no rows.

    Fix: Use zero_stage=0, or optimizer=adamw_8bit.
    """
    config = draft.config
    if config.trains_itself:
        return  # trainctl's adafactor knows the matrix of each flat piece
    if spec_of(config.optimizer).has_factored_states and config.zero_stage.stage > 0:
        yield Problem(
            f"optimizer.kind={config.optimizer.kind} at ZeRO stage {config.zero_stage.stage} "
            "updates flat partitions: its second moment is whole, and saves no memory",
            "zero_stage=0, or optimizer=adamw_8bit",
        )
