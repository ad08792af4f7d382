"""Reinforcement learning of TRL's GRPOConfig and RLOOConfig, and of OpenRLHF's train_ppo_ray."""

from __future__ import annotations

import re
from typing import Any

from trainctl.migration.configs.import_table import Conversion, is_number

TRL_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "exact_answer", "column": "solution"},
    "reasoning_accuracy_reward": {"kind": "exact_answer", "column": "solution"},
    "accuracy": {"kind": "exact_answer", "column": "solution"},
    "format": {
        "kind": "regex",
        "pattern": r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>",
    },
    "think_format_reward": {"kind": "regex", "pattern": "<think>(?!.*<think>).*?</think>.*"},
    "get_soft_overlong_punishment": {"kind": "length", "most_tokens": 1280, "soft_tokens": 256},
}
"""Nearest reward for each name of `trl grpo` (trl/scripts/grpo.py), and of open-r1."""
TRL_NORMALIZATIONS = {"grpo": "answer", "dr_grpo": "length", "dapo": "tokens", "bnpo": "tokens"}
TRL_ADVANTAGES = {
    "group": "standardized",
    "True": "standardized",
    "none": "centered",
    "False": "centered",
}
PROMPT_TOKENS = 512


def trl(source: Conversion) -> None:
    """Convert sampling, rewards and loss; nothing of them holds for another objective."""
    if source.converted.choices.get("objective") != "grpo":
        source.ignore("answers are not sampled while training", *source.keys_of("grpo.trl"))
        return
    is_rloo = str(source.get("class")).endswith("RLOOConfig")
    source.set(
        "objective.samples",
        source.count("num_generations") or (2 if is_rloo else 8),
        "num_generations",
    )
    answer = source.count("max_completion_length") or 512
    prompt = source.count("max_prompt_length") or PROMPT_TOKENS
    set_lengths(source, prompt, answer, "max_prompt_length", "max_completion_length")
    for name in ("temperature", "top_p", "top_k"):
        value = source.number(name)
        if value is not None:
            source.set(f"objective.{name}", max(0, int(value)) if name == "top_k" else value, name)
    low = source.number("epsilon") or 0.2
    source.set("objective.clip_low", low, "epsilon")
    source.set(
        "objective.clip_high", source.number("epsilon_high") or low, "epsilon_high", "epsilon"
    )
    if is_rloo:
        source.set("objective.advantage", "leave_one_out", "class")
        source.set("objective.ratio", "sequence", "class")
    else:
        _trl_loss(source)
    _trl_updates(source)
    _trl_server(source)
    _trl_rewards(source)


def set_lengths(source: Conversion, prompt: int, answer: int, *names: str) -> None:
    """Set the longest prompt and answer, and a sample that has room for both."""
    source.set("objective.max_prompt_tokens", prompt, names[0])
    source.set("objective.max_answer_tokens", answer, names[1])
    source.set("training.sequence_length", prompt + answer, *names)


def set_kl_weight(source: Conversion, weight: float, *names: str, has_reference: bool) -> None:
    """Set the weight of the KL divergence, which needs the weights before the first step."""
    if weight and not has_reference:
        source.leave(
            names[0],
            "a run keeps the weights before the first step only below an adapter that trains alone",
            f"adapter=lora, with objective.kl_weight={weight:g}",
        )
    else:
        source.set("objective.kl_weight", weight, *names)


def _trl_loss(source: Conversion) -> None:
    scale = str(source.get("scale_rewards") if source.given("scale_rewards") else "group")
    if scale not in TRL_ADVANTAGES:
        source.leave("scale_rewards")
    source.set("objective.advantage", TRL_ADVANTAGES.get(scale, "standardized"), "scale_rewards")
    level = str(source.get("importance_sampling_level") or "token")
    if level in ("token", "sequence"):
        source.set("objective.ratio", level, "importance_sampling_level")
    else:
        source.leave("importance_sampling_level")
    loss = " and ".join(source.texts("loss_type")) or "dapo"
    if loss not in TRL_NORMALIZATIONS:
        source.leave("loss_type", f"there is no loss {loss}", "objective.normalize_by=tokens")
    source.set("objective.normalize_by", TRL_NORMALIZATIONS.get(loss, "tokens"), "loss_type")


def _trl_updates(source: Conversion) -> None:
    """Convert micro-batches between two rollouts to optimizer steps."""
    accumulation = source.count("gradient_accumulation_steps") or 1
    micro_batches = source.count("steps_per_generation")
    if source.given("generation_batch_size"):
        source.leave("generation_batch_size")
    elif micro_batches and micro_batches % accumulation == 0:
        source.set("objective.updates", micro_batches // accumulation, "steps_per_generation")
    elif micro_batches:
        source.leave("steps_per_generation")


def _trl_server(source: Conversion) -> None:
    cap = source.number("vllm_importance_sampling_clip_max")
    source.set("objective.importance_cap", cap or 3.0, "vllm_importance_sampling_clip_max")
    names = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    if not source.is_on("use_vllm") or source.get("vllm_mode") != "server":
        source.set("objective.rollout", "engine")
        source.ignore("the training engine samples the answers", "use_vllm", "vllm_mode", *names)
        return
    host, port = source.get(names[1]) or "localhost", source.get(names[2]) or 8000
    host = "localhost" if host == "0.0.0.0" else host
    source.set("objective.rollout", "vllm", "use_vllm", "vllm_mode")
    source.set("objective.rollout_url", source.get(names[0]) or f"http://{host}:{port}", *names)


def _trl_rewards(source: Conversion) -> None:
    """Convert the named rewards; functions of the user's are called otherwise here."""
    weights = source.get("reward_weights")
    weights = weights if isinstance(weights, list) else []
    rewards: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(source.texts("reward_funcs")):
        module, _, function = name.rpartition(".")
        section = TRL_REWARDS.get(name) or {
            "kind": "function",
            "call": f"{module or 'my_rewards'}:{function}",
        }
        weight = weights[place] if place < len(weights) and is_number(weights[place]) else 1.0
        rewards[re.sub(r"\W", "_", function)] = {**section, "weight": float(weight)}
        if name not in TRL_REWARDS:
            source.leave(
                "reward_funcs",
                "a function gets one prompt, answer and mapping of columns, not lists of them",
                f"change {function} as docs/rewards.md says",
                value=name,
            )
    source.set("objective.rewards", rewards, "reward_funcs", "reward_weights")
