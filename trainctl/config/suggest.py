"""Suggestions in messages: the keys, options and recipes nearest to what was typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def words(text: str) -> tuple[str, ...]:
    """Split a text at whitespace; used for tables of names in multi-line strings."""
    return tuple(text.split())


_OTHER_NAMES_OF = {
    "activation_checkpointing": "gradient_checkpointing",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.rank": "lora_r",
    "adapter.targets": "target_modules",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "data": "dataset",
    "hardware.devices_per_node": "nproc_per_node num_gpus",
    "hardware.nodes": "nnodes num_nodes",
    "logging.every_steps": "logging_steps",
    "logging.to": "loggers metrics report_to wandb",
    "model.hidden_size": "n_embd",
    "model.num_attention_heads": "n_head",
    "model.num_layers": "n_layer num_hidden_layers",
    "model.path": "model_name_or_path",
    "offload": "cpu_offload",
    "offload.optimizer": "offload_optimizer",
    "offload.parameters": "offload_param",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.epsilon": "adam_epsilon eps",
    "optimizer.gradient_clipping": "clip_grad grad_clip max_grad_norm",
    "optimizer.lr": "learning_rate",
    "parallelism.context": "cp context_parallel_size",
    "parallelism.data": "dp",
    "parallelism.pipeline": "pipeline_parallel_size pp",
    "parallelism.sequence": "sp",
    "parallelism.tensor": "tensor_parallel_size tp",
    "precision": "bf16 fp16",
    "schedule": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.floor_ratio": "min_lr",
    "schedule.warmup_fraction": "warmup_ratio",
    "training.evaluate_every_steps": "eval_steps",
    "training.global_batch_size": "batch_size train_batch_size",
    "training.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "training.sequence_length": "block_size context_length max_seq_len max_seq_length seq_len "
    "seq_length",
    "training.steps": "max_iters max_steps num_steps",
    "training.tokens": "num_tokens",
}
OTHER_NAMES = {other: key for key, others in _OTHER_NAMES_OF.items() for other in words(others)}
"""Names that DeepSpeed, transformers and other trainers use, with trainctl's key for each."""

DEEPSPEED_KEYS = words(
    """
    aio bf16 comms_logger communication_data_type data_types flops_profiler fp16
    gradient_predivide_factor prescale_gradients steps_per_print torch_autocast
    wall_clock_breakdown zero_optimization
    """
)
"""Keys of DeepSpeed's JSON that users may type without the `deepspeed.` prefix."""

UNSUPPORTED_OPTIONS = {"objective": ("ppo", "bco", "cpo")}
"""Options of other trainers that trainctl lacks, by group; no near match is suggested for them."""

VARIANTS = {
    "objective": {
        "dapo": "objective=grpo objective.normalize_by=tokens objective.dynamic_sampling=2",
        "dr_grpo": "objective=grpo objective.advantage=centered objective.normalize_by=length",
        "gspo": "objective=grpo objective.ratio=sequence",
        "rloo": "objective=grpo objective.advantage=leave_one_out objective.normalize_by=length",
        "rm": "objective=reward",
    },
    "launcher": {
        "skypilot": "a managed job that runs trainctl launch (docs/schedulers.md#skypilot)"
    },
    "logger": {"csv": "what every run has: its steps are the tables RUN/steps/attempt-N.csv"},
}
"""Options of other trainers that are settings of an option here, and options of earlier versions,
by group.
"""

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
LONGEST = 100
"""Characters of a typed name that are compared; no legal name is longer."""


def nearest_names(typed: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return at most `count` of the names, the most similar first, ignoring case."""
    by_fold = {name.lower(): name for name in names}
    fold = typed.lower()[:LONGEST]
    close = get_close_matches(fold, by_fold, n=count, cutoff=0.6)
    starts = [name for name in by_fold if fold and name.startswith(fold)]
    return [by_fold[name] for name in dict.fromkeys([*close, *starts])][:count]


def variant_hint(group: str, option: str) -> str:
    """Return what there is here in place of an option of `VARIANTS`; empty for any other."""
    variant = VARIANTS.get(group, {}).get(option.lower().replace("-", "_"))
    return f"{option} is {variant}." if variant else ""


def nearest_keys(typed: str, keys: Iterable[str], groups: Iterable[str]) -> list[str]:
    """Return up to three keys or groups that were probably meant, the likeliest first.

    The lookup tries, in turn: names that other trainers use for the same setting, the last
    component anywhere in the schema (`lr` is `optimizer.lr`), then spelling, of the whole key and
    of its last component. A similarly spelled key of the typed section comes before the same name
    elsewhere.
    """
    keys, groups = list(keys), list(groups)
    section, _, last = typed.rpartition(".")
    if last in OTHER_NAMES:
        return [OTHER_NAMES[last]]
    same_name = [key for key in keys if key.rpartition(".")[2] == last]
    if same_name:
        beside = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
        close = get_close_matches(last[:LONGEST], beside, n=1, cutoff=0.8) if section else []
        elsewhere = nearest_names(typed, same_name) or same_name
        return [*(f"{section}.{name}" for name in close), *elsewhere][:3]
    by_last: dict[str, list[str]] = {}
    for key in keys:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    similar = [key for name in nearest_names(last, by_last) for key in by_last[name]]
    whole = nearest_names(typed, keys if "." in typed else [*groups, *keys, *OTHER_NAMES])
    meant = [OTHER_NAMES.get(name, name) for name in [*whole, *similar]]
    return list(dict.fromkeys(meant))[:3]


def explain_address(place: str) -> tuple[str, str] | None:
    """Return message and hint if a local path is a URL, or a URL that `Path` has shortened.

    None for any other path.
    """
    found = ADDRESS.match(place)
    if found is None:
        return None
    scheme = found[1]
    hint = "name a folder or file of this machine, or of a file system that is mounted here"
    if scheme == "file":
        hint = f"without the scheme: /{place[found.end() :]}"
    elif scheme == "hf":
        hint += "; a model of the hub is named as ORGANISATION/NAME"
    return f"{scheme}://... is an address, and no place in a file system", hint


def first_line(error: Exception) -> str:
    """Return the first line of a library's error; the other lines are for its developers."""
    return (str(error).splitlines() or [type(error).__name__])[0]


_WITHOUT_COLON = re.compile(r"\s*(?:- )?([A-Za-z_][\w.]*)(?:\s*=\s*|:)([^\s=]+)")


def missing_colon(text: str) -> tuple[str, str] | None:
    """Return message and hint for a line of YAML such as `steps = 40` or `steps:40`; None if it is
    no such line.
    """
    found = _WITHOUT_COLON.match(text)
    if found is None:
        return None
    *sections, name = found[1].split(".")
    line = f"{name}: {found[2]}"
    for section in reversed(sections):
        line = f"{section}: {{{line}}}"
    return f"`{found[0].strip()}` lacks a colon with a space behind it", f"write `{line}`"


def did_you_mean(names: list[str]) -> str:
    """Format names as a question; empty without names."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def join_alternatives(names: Sequence[str]) -> str:
    """Format names as alternatives: ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
