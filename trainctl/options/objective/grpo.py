"""Group-relative policy optimization (GRPO, arXiv:2402.03300) and its variants, by three keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, Objective
from trainctl.options.reward import RewardsConfig


class Rollout(Enum):
    """Program that samples the answers."""

    engine = "engine"
    vllm = "vllm"


class Advantage(Enum):
    """Advantage of an answer, as a function of the rewards of its prompt's answers."""

    standardized = "standardized"
    centered = "centered"
    leave_one_out = "leave_one_out"


class Ratio(Enum):
    """Unit whose probability ratio is clipped."""

    token = "token"
    sequence = "sequence"


class NormalizeBy(Enum):
    """Divisor of the summed loss of the tokens."""

    answer = "answer"
    tokens = "tokens"
    length = "length"


_SEVERAL_UPDATES: Any = (lambda s: s.updates > 1, "objective.updates above 1")


@dataclass
class GrpoConfig(RewardsConfig):
    """Keys of GRPO, Dr. GRPO, RLOO, GSPO and DAPO.

    A sample of the run is one answer, so `training.global_batch_size` counts answers.
    """

    rollout: Rollout = option(
        Rollout.engine,
        "Program that samples the answers: the training engine itself, or a vLLM server.",
    )
    rollout_url: str | None = option(
        None,
        "URL of the vLLM server, which must return log-probabilities.",
        example="http://localhost:8000",
        needs=(lambda s: s.rollout is Rollout.vllm, "objective.rollout=vllm"),
    )
    samples: int = option(8, "Answers to each prompt, which are compared.", minimum=2)
    max_prompt_tokens: int = option(
        512, "Longest prompt; a longer one is left out.", unit="tokens", minimum=1
    )
    max_answer_tokens: int = option(
        1024, "Longest answer; a longer one is cut.", unit="tokens", minimum=1
    )
    rollout_batch_size: int | None = option(
        None,
        "Answers that a data-parallel rank samples at a time; null takes as many as memory allows.",
        unit="answers",
        minimum=1,
    )
    temperature: float = option(1.0, "Divides the logits, in sampling and in training.", above=0)
    top_p: float = option(
        1.0, "Sample from the likeliest tokens with this total probability.", above=0, maximum=1
    )
    top_k: int = option(0, "Sample from so many likeliest tokens; 0 is all.", minimum=0)
    advantage: Advantage = option(
        Advantage.standardized,
        "Reward compared with the prompt's other answers: less their mean and divided by their "
        "standard deviation (standardized, GRPO), less the mean (centered, Dr. GRPO), or less the "
        "mean of the other answers (leave_one_out, RLOO).",
    )
    ratio: Ratio = option(
        Ratio.token,
        "Unit of the probability ratio: each token (GRPO), or the geometric mean over an answer "
        "(sequence, GSPO).",
    )
    normalize_by: NormalizeBy = option(
        NormalizeBy.answer,
        "Mean of the loss: over an answer's tokens, then over answers (answer, GRPO); over all "
        "tokens of the global batch (tokens, DAPO); sum divided by objective.max_answer_tokens, "
        "then over answers (length, Dr. GRPO).",
    )
    clip_low: float = option(
        0.2,
        "Largest decrease of the probability ratio with a gradient.",
        above=0,
        maximum=1,
        needs=_SEVERAL_UPDATES,
    )
    clip_high: float = option(
        0.2,
        "Largest increase of the probability ratio with a gradient; DAPO has 0.28.",
        above=0,
        needs=_SEVERAL_UPDATES,
    )
    kl_weight: float = option(
        0.0, "Weight of the KL divergence to the weights before the first step.", minimum=0
    )
    updates: int = option(
        1, "Optimizer steps on the answers of one policy, each on its own prompts.", minimum=1
    )
    dynamic_sampling: int = option(
        0,
        "Most further rounds of prompts in place of those whose answers all have the same reward "
        "(DAPO); 0 keeps them, without a gradient.",
        unit="rounds",
        minimum=0,
    )
    no_signal_steps: int | None = option(
        10,
        "Steps in a row in which a reward fails for every answer, or all answers to each prompt "
        "have the same reward, after which the run stops; null goes on.",
        unit="optimizer steps",
        minimum=1,
    )
    mismatch_limit: float = option(
        0.1,
        "Largest mean absolute difference between log-probabilities of rollout and trainer, above "
        "which the run stops.",
        unit="nats",
        above=0,
    )
    importance_cap: float = option(
        2.0, "Largest importance weight of a token, which corrects that difference.", minimum=1
    )


def answers_per_prompt(section: ObjectiveConfig) -> int:
    """Return how many samples of a run a sample of its corpus makes: the answers to a prompt."""
    return section.samples if isinstance(section, GrpoConfig) else 1


def measures_of(section: GrpoConfig) -> tuple[str, ...]:
    """Return the names of the means over the tokens of the answers.

    Absolute difference of log-probabilities between rollout and trainer, importance weight,
    negative log-probability (an estimate of the entropy), share of tokens whose ratio is clipped,
    KL divergence to the reference, KL divergence of trainer and rollout, and share of tokens whose
    difference is above `mismatch_limit`.
    """
    names = ["mismatch", "importance", "entropy"]
    names += ["clipped"] * (section.updates > 1) + ["kl"] * (section.kl_weight > 0)
    return (*names, "mismatch_kl", "mismatch_share")


SPEC = Objective(
    name="grpo",
    keys=GrpoConfig,
    build="trainctl.train.objectives.grpo:grpo",
    takes=SampleKind.prompts,
    counts=RECORDS,
    measures=measures_of,
)
