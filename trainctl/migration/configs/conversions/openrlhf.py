"""Command lines of OpenRLHF: train_sft, train_dpo, train_rm, train_kto and train_ppo_ray."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from trainctl.migration.configs.conversions import trainer, trl
from trainctl.migration.configs.conversions.grpo import set_kl_weight, set_lengths
from trainctl.migration.configs.import_table import Conversion, is_number
from trainctl.migration.configs.result import Why

OBJECTIVES = {
    "train_sft": "next_token",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_rm": "reward",
    "train_ppo_ray": "grpo",
}
"""Objective of each program. OpenRLHF of 2026 has no `train_kto`."""
DATA = {
    "dpo": "preferences",
    "grpo": "prompts",
    "kto": "answers",
    "next_token": "chat",
    "reward": "preferences",
}
DEFAULTS: dict[str, tuple[float, int, int, int]] = {
    "next_token": (5e-6, 8, 2, 2048),
    "dpo": (1e-5, 8, 1, 512),
    "reward": (9e-6, 1, 1, 512),
    "grpo": (1e-6, 1, 1, 2048),
    "kto": (1e-5, 8, 1, 512),
}
"""Learning rate, micro-batch, epochs and length of each program's arguments by default."""
DYNAMIC_ROUNDS = 8
ADVANTAGES = {
    "group_norm": "standardized",
    "dr_grpo": "centered",
    "rloo": "leave_one_out",
    "reinforce_baseline": "centered",
}


def _kind(source: Conversion) -> str:
    return str(source.converted.choices["objective"])


def objective(source: Conversion) -> None:
    """Convert the program, or without one the keys that only it has, and the loss of pairs."""
    program = str(source.get("openrlhf") or "")
    kind = OBJECTIVES.get(program)
    if kind is None and program:
        source.leave("openrlhf")
    if kind is None:
        is_sampled = source.given("rollout.batch_size") or source.name_of("data.dataset") in (
            "data.prompt_dataset",
            "prompt_data",
        )
        kind = "grpo" if is_sampled else "dpo" if source.given("model.beta") else "next_token"
    source.set("objective", kind, "openrlhf")
    source.set("data", DATA[kind], "openrlhf")
    if kind in ("dpo", "kto"):
        source.set("objective.beta", source.number("model.beta"), "model.beta")
    else:
        _ignore(source, kind, "model.beta")
    for name in ("desirable", "undesirable"):
        weight = source.number(f"{name}_loss_weight")
        if kind == "kto" and weight is not None:
            source.set(f"objective.{name}_weight", weight, f"{name}_loss_weight")
        else:
            _ignore(source, kind, f"{name}_loss_weight")
    if kind != "dpo":
        _ignore(source, kind, "model.ipo_enable", "model.label_smoothing")
        return
    is_ipo = source.is_on("model.ipo_enable")
    source.set("objective.loss", "ipo" if is_ipo else "sigmoid", "model.ipo_enable")
    if source.number("model.label_smoothing"):
        source.set(
            "objective.label_smoothing",
            source.number("model.label_smoothing"),
            "model.label_smoothing",
        )


def _ignore(source: Conversion, kind: str, *names: str) -> None:
    source.ignore(f"objective={kind} has none", *names)


def adapter(source: Conversion) -> None:
    """Convert the adapter with the format of the frozen base."""
    rank = source.count("ds.lora.rank")
    source.set("adapter", "lora" if rank else "none", "ds.lora.rank")
    if not rank:
        _ignore(source, _kind(source), *source.keys_of("openrlhf.adapter", but=["ds.lora.rank"]))
        return
    targets = source.texts("ds.lora.target_modules")
    source.set("adapter.rank", rank, "ds.lora.rank")
    source.set("adapter.alpha", source.number("ds.lora.alpha"), "ds.lora.alpha")
    source.set("adapter.dropout", source.number("ds.lora.dropout"), "ds.lora.dropout")
    trainer.set_targets(
        source, [] if targets == ["all-linear"] else targets, "ds.lora.target_modules"
    )
    weights = "nf4" if source.is_on("ds.load_in_4bit") else "compute"
    source.set("adapter.base_weights", weights, "ds.load_in_4bit")


def data(source: Conversion) -> None:
    """Convert data sets, their splits and the keys of their records."""
    kind, split = _kind(source), str(source.get("data.dataset_split"))
    sets = [each for name in source.texts("data.dataset") for each in name.split(",") if each]
    source.set("data.paths", _places(source, sets, split), "data.dataset")
    held_out = source.texts("eval.dataset")
    if held_out:
        its_split = str(source.get("eval.split") or "test")
        places = _places(source, held_out, its_split)
        source.set("data.held_out_paths", places, "eval.dataset", "eval.split")
    else:
        source.ignore("of eval.dataset", "eval.split")
    usual = {"next_token": ("messages", "prompt"), "grpo": ()}.get(kind, ("prompt",))
    name = "data.input_key" if kind in ("next_token", "grpo") else "data.prompt_key"
    if kind == "grpo":
        source.set("data.prompt_key", str(source.get(name) or "input"), name)
        source.set(
            "data.as_message",
            source.is_on("data.apply_chat_template"),
            "data.apply_chat_template",
        )
    elif source.given(name) and source.get(name) not in usual:
        source.leave(name, f"the key of a record is {' or '.join(usual)}", "write the records anew")
    _ignore(source, kind, *({"data.input_key", "data.prompt_key"} - {name}))
    if kind != "grpo":
        reason = "messages are rendered by the chat template"
        source.ignore(reason, "data.apply_chat_template")


def _places(source: Conversion, names: list[str], split: str) -> list[str]:
    parted = (name.partition("@") for name in names)
    return [
        place
        for folder, _, suffix in parted
        for place in trl.places_of(source, folder, suffix or "default", split)
    ]


def lengths(source: Conversion) -> None:
    """Convert the longest sample, and of sampled answers what of it is the prompt's."""
    kind = _kind(source)
    whole = source.count("data.max_len") or DEFAULTS[kind][3]
    if kind != "grpo":
        source.set("training.sequence_length", whole, "data.max_len")
        _ignore(source, kind, "prompt_max_len", "rollout.max_new_tokens")
        return
    answer = source.count("rollout.max_new_tokens") or whole // 2
    prompt = source.count("prompt_max_len") or max(1, whole - answer)
    set_lengths(source, prompt, answer, "prompt_max_len", "rollout.max_new_tokens", "data.max_len")


def batch(source: Conversion) -> None:
    """Convert the micro-batch, whose default depends on the program."""
    found = source.count("train.micro_batch_size") or DEFAULTS[_kind(source)][1]
    source.set("training.micro_batch_size", found, "train.micro_batch_size")


def length(source: Conversion) -> None:
    """Convert passes over the data: epochs, or of prompts episodes."""
    kind = _kind(source)
    epochs = source.count("train.max_epochs") or DEFAULTS[kind][2]
    if kind != "grpo":
        source.set("training.epochs", float(epochs), "train.max_epochs")
        _ignore(source, kind, "train.num_episodes")
        return
    source.set("training.epochs", float(source.count("train.num_episodes")), "train.num_episodes")
    if epochs > 1:
        source.leave("train.max_epochs", "answers are used once", "objective.updates")


def optimizer(source: Conversion) -> None:
    """Convert the optimizer with its rate and betas."""
    kind = "muon" if source.get("optim") == "muon" else "adamw"
    source.set("optimizer", kind, "optim")
    source.set("optimizer.lr", source.number("adam.lr") or DEFAULTS[_kind(source)][0], "adam.lr")
    betas = source.get("adam.betas")
    betas = betas if isinstance(betas, list) and len(betas) == 2 else [0.9, 0.95]
    for ours, value in zip(("beta1", "beta2"), betas, strict=True):
        source.set(f"optimizer.{ours}", value, "adam.betas")


def schedule(source: Conversion) -> None:
    """Convert the schedule and its lowest rate."""
    kind = str(source.get("lr_scheduler"))
    if kind not in trainer.SCHEDULES:
        source.leave("lr_scheduler")
    option, keys = trainer.SCHEDULES.get(kind, ("cosine", {}))
    source.set("schedule", option, "lr_scheduler")
    for key, value in keys.items():
        source.set(f"schedule.{key}", value)
    trainer.set_ends(source)
    if kind == "cosine_with_min_lr":
        source.set("schedule.floor_ratio", source.number("min_lr_ratio"), "min_lr_ratio")
    else:
        _ignore(source, _kind(source), "min_lr_ratio")


def sampling(source: Conversion) -> None:
    """Convert how answers are sampled and learned from."""
    if _kind(source) != "grpo":
        _ignore(source, _kind(source), *source.keys_of("openrlhf.sampling"))
        return
    samples = source.count("rollout.n_samples_per_prompt")
    if samples < 2:
        source.leave("rollout.n_samples_per_prompt")
        samples = 8
    source.set("objective.samples", samples, "rollout.n_samples_per_prompt")
    for name in ("temperature", "top_p"):
        source.set(f"objective.{name}", source.number(f"rollout.{name}"), f"rollout.{name}")
    sampled, step = source.count("rollout.batch_size") * samples, source.count("train.batch_size")
    if sampled % step == 0:
        source.set("objective.updates", sampled // step, "rollout.batch_size")
    else:
        source.leave(
            "rollout.batch_size",
            f"{sampled} answers are no whole steps of {step}",
            "objective.updates=1",
        )
    _advantage(source)
    low_high = source.get("actor.eps_clip_low_high")
    clip = source.number("actor.eps_clip") or 0.2
    low, high = low_high if isinstance(low_high, list) and len(low_high) == 2 else (clip, clip)
    names = ("actor.eps_clip", "actor.eps_clip_low_high")
    source.set("objective.clip_low", low, *names)
    source.set("objective.clip_high", high, *names)
    ratio = "sequence" if source.get("actor.policy_loss_type") == "gspo" else "token"
    source.set("objective.ratio", ratio, "actor.policy_loss_type")
    threshold = source.get("algo.advantage.is_correction_threshold")
    values = threshold if isinstance(threshold, list) else [threshold]
    if is_number(values[-1]):
        source.set("objective.importance_cap", values[-1], "algo.advantage.is_correction_threshold")
    if source.is_on("algo.dynamic_filtering_enable"):
        source.set("objective.dynamic_sampling", DYNAMIC_ROUNDS, "algo.dynamic_filtering_enable")


def _advantage(source: Conversion) -> None:
    """Convert the estimator, and the weight of the KL divergence if it is a term of the loss."""
    estimator = str(source.get("algo.advantage.estimator"))
    found = ADVANTAGES.get(estimator, "standardized")
    if estimator not in ADVANTAGES:
        source.leave("algo.advantage.estimator")
    if source.is_on("algo.advantage.no_std_norm") and found == "standardized":
        found = "centered"
    source.set(
        "objective.advantage", found, "algo.advantage.estimator", "algo.advantage.no_std_norm"
    )
    by = "length" if estimator == "dr_grpo" else "tokens"
    source.set("objective.normalize_by", by, "algo.advantage.estimator")
    weight = source.number("algo.kl.init_coef") or 0.0
    if source.is_on("algo.kl.use_loss"):
        names = ("algo.kl.init_coef", "algo.kl.use_loss")
        has_adapter = source.count("ds.lora.rank") > 0
        set_kl_weight(source, weight, *names, has_reference=has_adapter)
    elif weight:
        source.leave(
            "algo.kl.init_coef",
            "the KL divergence is a term of the loss, not of the reward",
            f"objective.kl_weight={weight}",
        )


def rewards(source: Conversion) -> None:
    """Convert the user's function, the right answers and the penalty of long answers."""
    names = (
        "reward.remote_url",
        "data.label_key",
        "reward.overlong_buffer_len",
        "reward.overlong_penalty_factor",
    )
    if _kind(source) != "grpo":
        _ignore(source, _kind(source), *names)
        return
    found: dict[str, dict[str, Any]] = {}
    url, label = source.get("reward.remote_url"), source.get("data.label_key")
    if url is not None:
        is_file = str(url).endswith(".py")
        call = f"{PurePath(str(url)).stem if is_file else 'my_rewards'}:reward_func"
        found["reward"] = {"kind": "function", "call": call}
        source.leave(
            "reward.remote_url",
            "a function gets one prompt, answer and mapping of columns",
            f"change {call} as docs/rewards.md says",
        )
    if label is not None and url is None:
        found["exact_answer"] = {"kind": "exact_answer", "column": str(label)}
    elif label is not None:
        source.leave("data.label_key", "a function finds all columns of a record", why=Why.ignored)
    buffer = source.count("reward.overlong_buffer_len")
    if buffer:
        most = source.converted.settings["objective.max_answer_tokens"]
        weight = source.number("reward.overlong_penalty_factor")
        found["length"] = {
            "kind": "length",
            "most_tokens": most,
            "soft_tokens": buffer,
            "weight": weight,
        }
    else:
        _ignore(source, "grpo", "reward.overlong_penalty_factor")
    if found:
        source.set("objective.rewards", found, *names)


def saving(source: Conversion) -> None:
    """Convert the intervals between checkpoints and evaluations; -1 is the end of the run."""
    for name, ours in (
        ("ckpt.save_steps", "checkpoint.every_steps"),
        ("eval.steps", "training.evaluate_every_steps"),
    ):
        steps = source.number(name) or -1
        if steps < 1 or (name == "eval.steps" and not source.given("eval.dataset")):
            source.ignore("it is off", name)
        else:
            source.set(ours, int(steps), name)


def trackers(source: Conversion) -> None:
    """Convert the trackers; credentials stay in the environment."""
    named = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    used = [name for name, key in named.items() if source.get(key) not in (None, False)]
    if used:
        source.set("logging.to", used, *named.values())
    keys = {"project": "project", "org": "entity", "group": "group"}
    for theirs, ours in keys.items():
        name = f"logger.wandb.{theirs}"
        if "wandb" in used:
            source.copy(f"logging.wandb.{ours}", name)
        else:
            _ignore(source, _kind(source), name)
