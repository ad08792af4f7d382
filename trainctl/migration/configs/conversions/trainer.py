"""Arguments of transformers' Trainer, which LLaMA-Factory and others take too."""

from __future__ import annotations

from math import ceil
from typing import Any

from trainctl.migration.configs.import_table import Conversion, is_number
from trainctl.migration.configs.result import Why
from trainctl.models.directory import is_hub_name


def length(source: Conversion) -> None:
    """Convert `max_steps`, which replaces the epochs if it is above 0."""
    convert_length(source, "num_train_epochs")


def convert_length(source: Conversion, name: str) -> None:
    """Convert `max_steps`, and the epochs, which are under the key `name`."""
    steps, epochs = source.number("max_steps"), source.number(name)
    if steps and steps > 0:
        source.set("training.steps", int(steps), "max_steps")
        source.ignore("max_steps replaces it", name)
    elif epochs and epochs > 0:
        source.set("training.epochs", float(epochs), name)


def precision(source: Conversion) -> None:
    """Convert the switches `bf16` and `fp16`: mixed precision by autocast over fp32 weights.

    DeepSpeed's own formats keep weights in 16 bits beside fp32 master weights, which is what the
    Trainer does with a DeepSpeed JSON.
    """
    if source.is_on("bf16"):
        source.set("precision", "bf16", "bf16")
    elif source.is_on("fp16"):
        source.set("precision", "fp16", "fp16")
    else:
        source.set("precision", "fp32")


def set_pure_bf16(source: Conversion, name: str) -> None:
    """Set the formats of training without mixed precision, which the key `name` asks for.

    8-bit states have a format of their own, so that only the weights would be bf16.
    """
    if source.converted.choices.get("optimizer") == "adamw_8bit":
        source.set("precision", "bf16")
        source.leave(name, "master weights beside 8-bit states are fp32", "precision=bf16")
    else:
        source.set("precision", "bf16-low-memory", name)


def least_stage(source: Conversion) -> str:
    """Return the ZeRO stage of a program that shards nothing.

    It is 0, or 1 where DeepSpeed needs ZeRO: to scale the loss of fp16, for master weights in bf16,
    and to clip by the norm of experts on several ranks. Results are the same.
    """
    needs = source.converted.choices.get("precision") in ("fp16", "bf16-low-memory")
    experts = source.converted.settings.get("parallelism.expert", 1)
    return "1" if needs or experts != 1 else "0"


def set_targets(source: Conversion, targets: list[str], *names: str) -> None:
    """Set the layers with an adapter, which are those of the blocks: not the embeddings or the
    head, unless nothing else is named, which a plan refuses.

    Args:
        names: Keys of the source that ask for them; the first has the names of layers.
    """
    outside = [each for each in targets if each.rpartition(".")[2] in ALSO_TRAINED]
    if outside:
        also = {ALSO_TRAINED[each.rpartition(".")[2]] for each in outside}
        source.leave(
            names[0],
            "adapters are on the blocks' layers",
            f"adapter.also_train=[{','.join(sorted(also))}], which trains them whole",
            value=outside,
        )
    within = [each for each in targets if each not in outside]
    source.set("adapter.targets", within or targets, *names)


def with_experts(source: Conversion, targets: list[str]) -> list[str]:
    """Return the targets of an adapter with the stacked experts that PEFT names apart.

    Without targets, which are then all linear layers, the experts are left.
    """
    experts = source.texts("lora_target_parameters")
    if experts and not targets:
        source.leave(
            "lora_target_parameters",
            "experts are named beside the linear layers",
            "adapter.targets=[q_proj,experts.down_proj]",
        )
    return targets + experts if targets else []


SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"floor_ratio": 0.0}),
    "cosine": ("cosine", {"floor_ratio": 0.0}),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant", {}),
    "polynomial": ("polynomial", {"power": 1.0}),
    "inverse_sqrt": ("inverse_sqrt", {"floor_ratio": 0.0}),
    "reduce_lr_on_plateau": ("plateau", {"step_factor": 0.1, "plateau_patience": 11}),
    "cosine_with_min_lr": ("cosine", {}),
    "cosine_warmup_with_min_lr": ("cosine", {}),
    "cosine_with_restarts": ("cosine_restarts", {"restart_factor": 1, "floor_ratio": 0.0}),
    "warmup_stable_decay": ("wsd", {"decay_shape": "cosine", "floor_ratio": 0.0}),
}
"""Schedule and its keys for each `lr_scheduler_type` (transformers, optimization.py)."""


def schedule(source: Conversion) -> None:
    """Convert `lr_scheduler_type`, its arguments and the warmup."""
    convert_schedule(source, "lr_scheduler_type")


def convert_schedule(source: Conversion, name: str) -> None:
    """Convert the schedule that the key `name` names, its arguments and the warmup."""
    kind = str(source.get(name))
    if kind not in SCHEDULES:
        source.leave(name, f"there is no schedule {kind}", "schedule=cosine, or another one")
        source.set("schedule", "cosine")
    else:
        option, keys = SCHEDULES[kind]
        source.set("schedule", option, name)
        for key, value in keys.items():
            source.set(f"schedule.{key}", value)
    set_ends(source)
    warmup(source, is_used=kind != "constant")
    _schedule_arguments(source, kind)
    if kind == "cosine_warmup_with_min_lr":
        source.leave(name, "its rate falls from the last step of the warmup on; here from the next")
        source.set("schedule.warmup_from_zero", False)
        source.set("schedule.floor_after_end", False)


def set_ends(source: Conversion) -> None:
    """Set where a schedule of torch's LambdaLR begins and ends: at the rates 0 and floor, before
    the first step and after the last.
    """
    source.set("schedule.warmup_from_zero", True)
    source.set("schedule.floor_after_end", True)


WARMUP = "schedule.warmup_steps"
DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "one_minus_sqrt"}
"""Shape of the final decay for each `decay_type`."""


def _schedule_arguments(source: Conversion, kind: str) -> None:
    """Convert `lr_scheduler_kwargs`, also where none are given but their defaults matter."""
    name = "lr_scheduler_kwargs"
    given = source.get(name)
    arguments = dict(given) if isinstance(given, dict) else {}
    if kind == "polynomial":
        arguments.setdefault("lr_end", 1e-7)
    known = {}
    for argument, value in arguments.items():
        found = _schedule_argument(kind, argument, value, source.number("learning_rate"))
        if found is not None:
            known[argument] = found
    for ours, value in known.values():
        source.set(ours, value, name)
    if kind == "warmup_stable_decay" and source.converted.settings["schedule.floor_ratio"]:
        source.leave("lr_scheduler_type", "the warmup begins at the floor there, and at 0 here")
    if kind == "cosine_with_restarts":
        _restarts(source, arguments)
        known["num_cycles"] = ("", 0)
    is_flat = kind == "inverse_sqrt" and not (
        source.get("warmup_steps") or source.get("warmup_ratio")
    )
    if is_flat and "timescale" not in arguments:
        source.leave(
            "lr_scheduler_type",
            "without a warmup its rate falls from step 10,000 on; here from the first",
            "schedule.warmup_steps=N",
        )
    rest = {each: value for each, value in arguments.items() if each not in known}
    if rest:
        source.leave(
            name,
            f"no key for {', '.join(rest)} of {kind}",
            "the keys of the group schedule",
            value=rest,
        )


def _schedule_argument(
    kind: str, name: str, value: Any, peak: float | None
) -> tuple[str, Any] | None:
    """Return trainctl's key and value for an argument of a schedule; None if there is none."""
    if kind == "warmup_stable_decay" and name == "decay_type" and value in DECAYS:
        return "schedule.decay_shape", DECAYS[value]
    if not is_number(value):
        return None
    if name in ("min_lr_rate", "min_lr_ratio"):
        return "schedule.floor_ratio", value
    if name in ("min_lr", "lr_end") and peak:
        return "schedule.floor_ratio", value / peak
    if name == "patience":
        return "schedule.plateau_patience", int(value) + 1  # torch drops after one more
    keys = {"power": "power", "factor": "step_factor"}
    if kind == "warmup_stable_decay":
        keys["num_decay_steps"] = "decay_steps"
    return (f"schedule.{keys[name]}", value) if name in keys else None


def _restarts(source: Conversion, arguments: dict[str, Any]) -> None:
    """Convert the number of cycles to their length, which needs the length of the run."""
    steps, warmup = source.count("max_steps"), source.converted.settings.get(WARMUP) or 0
    cycles = arguments.get("num_cycles", 1)
    if steps > warmup and is_number(cycles) and cycles >= 1:
        length = max(1, round((steps - warmup) / cycles))
        source.set("schedule.step_every", length, "lr_scheduler_type")
        if length * cycles != steps - warmup:
            source.leave(
                "lr_scheduler_type",
                f"a cycle is whole steps: {length}, where there are {(steps - warmup) / cycles:g}",
                f"schedule.step_every={length}",
            )
    elif cycles == 1:
        source.set("schedule", "cosine", "lr_scheduler_type")
        source.converted.settings.pop("schedule.restart_factor", None)
    else:
        source.leave(
            "lr_scheduler_type",
            f"a cycle is counted in steps: {cycles} cycles in the run",
            "schedule.step_every=N",
        )


def warmup(source: Conversion, *, is_used: bool = True) -> None:
    """Convert `warmup_steps` (below 1: a fraction of the run) and `warmup_ratio`."""
    steps, ratio = source.number("warmup_steps") or 0, source.number("warmup_ratio") or 0
    given = [name for name in ("warmup_steps", "warmup_ratio") if source.given(name)]
    if not is_used:
        source.set("schedule.warmup_fraction", 0.0)
        for name in given:
            source.leave(name, "this schedule has no warmup there", why=Why.ignored)
    elif steps >= 1:
        source.set(WARMUP, int(steps), "warmup_steps")
        if "warmup_ratio" in given:
            source.leave("warmup_ratio", "warmup_steps replaces it", why=Why.ignored)
    else:
        name, whole = "warmup_steps" if steps else "warmup_ratio", source.count("max_steps")
        if whole:  # a share of it is rounded up there
            source.set(WARMUP, ceil(whole * (steps or ratio)), name)
        else:
            source.set("schedule.warmup_fraction", float(steps or ratio), name)


def saving(source: Conversion) -> None:
    """Convert the intervals between checkpoints; epochs have no counterpart."""
    convert_saving(source, str(source.get("save_strategy")))


def convert_saving(source: Conversion, strategy: str) -> None:
    """Convert `save_steps` by a strategy: steps, no, best, none (said already), or epoch."""
    steps = source.number("save_steps")
    source.set("checkpoint.every_steps", None)
    if strategy in ("steps", "no", "False", "best"):
        source.set("checkpoint.every_minutes", None)
    if strategy == "steps":
        if steps is not None and steps >= 1:
            source.set("checkpoint.every_steps", int(steps), "save_steps")
        else:
            source.leave(
                "save_steps", "a fraction of the run has no key", "checkpoint.every_steps=N"
            )
        return
    source.ignore(f"save_strategy={strategy} replaces it", "save_steps")
    if strategy in ("no", "False"):
        source.set("checkpoint.at_end", False)
    elif strategy == "best":
        source.set("checkpoint.best_of", "loss", "save_strategy")
    elif strategy != "none":
        source.leave(
            "save_strategy",
            "checkpoints are made by steps or minutes, not by epochs",
            "checkpoint.every_steps=N",
            value=strategy,
        )


def evaluation(source: Conversion) -> None:
    """Convert the intervals between evaluations."""
    convert_evaluation(source, str(source.get("eval_strategy")))


def convert_evaluation(source: Conversion, strategy: str) -> None:
    """Convert `eval_steps` by a strategy: steps, no, end (of the run), or epoch."""
    steps = source.number("eval_steps")
    if strategy == "steps":
        steps = source.number("logging_steps") if steps is None else steps
        if steps is not None and steps >= 1:
            source.set("training.evaluate_every_steps", int(steps), "eval_steps")
        else:
            source.leave(
                "eval_steps",
                "a fraction of the run has no key",
                "training.evaluate_every_steps=N",
            )
        return
    source.ignore(f"eval_strategy={strategy} replaces it", "eval_steps")
    if strategy in ("no", "False"):
        source.set("training.evaluation_samples", 0)
    elif strategy != "end":
        source.leave(
            "eval_strategy",
            "evaluations are made by steps, and at the end, not by epochs",
            "training.evaluate_every_steps=N",
            value=strategy,
        )


def convert_held_out(source: Conversion, name: str, *, has_files: bool) -> None:
    """Convert the share of the data that is held out, unless files of its own are."""
    share = source.number(name) or 0.0
    if has_files:
        return
    if not 0 <= share <= 0.5:
        source.leave(name)
        return
    source.set("data.held_out_fraction", float(share), name)
    if not share:
        source.set("training.evaluation_samples", 0)


ALSO_TRAINED = {
    **dict.fromkeys(("embed_tokens", "embed_in", "wte", "word_embeddings"), "embeddings"),
    **dict.fromkeys(("lm_head", "embed_out"), "head"),
}
"""Parts of a model, as `adapter.also_train` names them, by the names of their modules."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def trackers(source: Conversion) -> None:
    """Convert `report_to`; trackers that trainctl has no logger for are left out."""
    names = source.texts("report_to")
    known = list(TRACKERS) if "all" in names else [name for name in names if name in TRACKERS]
    source.set("logging.to", known, "report_to")
    other = [name for name in names if name not in (*TRACKERS, "all", "none")]
    if other:
        source.leave(
            "report_to",
            f"there is no logger {', '.join(other)}",
            f"logging.to=[{', '.join(TRACKERS)}], or a logger of your own (docs/options.md)",
            value=other,
        )


def convert_teacher(source: Conversion, teacher: str, beta: str, *, default_beta: float) -> None:
    """Convert the teacher of a distillation, and the divergence that `beta` selects.

    0 is the forward KL, 1 the reverse, and between them the generalized Jensen-Shannon divergence.

    Args:
        teacher: Key with a directory or a name on the hub.
        beta: Key with the divergence, as in TRL's GKD.
    """
    path, value = source.get(teacher), source.number(beta)
    if path is None:
        source.leave(teacher, "log-probabilities in the data are not read", "objective.teacher=DIR")
    elif is_hub_name(str(path)):
        source.leave(
            teacher,
            "a teacher is a directory",
            f"hf download {path} --local-dir DIR, and objective.teacher=DIR",
        )
    else:
        source.set("objective.teacher", str(path), teacher)
    value = default_beta if value is None else value
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(value), "jsd")
    source.set("objective.divergence", kind, beta)
    if kind == "jsd":
        source.set("objective.beta", value, beta)
