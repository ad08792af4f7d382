"""Distillation: the student learns a teacher's distributions over the next token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.objective import LOGITS, Objective

TEACHER = "teacher"
"""Name of the stored array: rows of `trainctl.data.teacher_store.TeacherStore`, which a pass of the
teacher over all samples computes before the first step.
"""


class DivergenceKind(Enum):
    """Divergence between the teacher's distribution p and the student's q."""

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"


class StoredValues(Enum):
    """Number format of the stored log-probabilities."""

    fp16 = "fp16"
    fp32 = "fp32"


@dataclass
class DistillConfig(ObjectiveConfig):
    """Keys of distillation."""

    teacher: str | None = option(
        None,
        "Teacher: a transformers directory, a run's directory (its newest checkpoint) or a "
        "checkpoint. It must have the student's tokenizer.",
        local=True,
    )
    teacher_log_probabilities: str | None = option(
        None,
        "Folder in which the teacher's log-probabilities are stored, on a file system of all "
        "ranks. Without teacher, they must be there. null: beside the tokenized corpus.",
        local=True,
    )
    top_k: int = option(
        64, "Stored tokens of each position, the teacher's most probable ones.", minimum=1
    )
    store_as: StoredValues = option(
        StoredValues.fp16, "Number format of the stored log-probabilities: fp16 or fp32."
    )
    divergence: DivergenceKind = option(
        DivergenceKind.forward_kl,
        "forward_kl is KL(teacher || student), reverse_kl is KL(student || teacher), jsd the "
        "generalized Jensen-Shannon divergence (arXiv:2306.13649).",
    )
    beta: float = option(
        0.5,
        "Weight of the teacher in the mixture of jsd.",
        minimum=0.01,
        maximum=0.99,
        needs=(lambda s: s.divergence is DivergenceKind.jsd, "objective.divergence=jsd"),
    )
    temperature: float = option(
        1.0, "Temperature of both distributions; the labels' loss has none.", above=0
    )
    label_weight: float = option(
        0.0,
        "Weight w of the labels' cross entropy: the loss is (1 - w) divergence + w cross entropy.",
        minimum=0,
        maximum=1,
    )


def row_bytes(config: DistillConfig, vocab_size: int) -> int:
    """Return the bytes that a position with a label takes in the store: position, log-probability
    of all other tokens, and the ids and log-probabilities of `top_k` tokens.
    """
    ids, values = 2 if vocab_size <= 1 << 16 else 4, int(config.store_as.value[2:]) // 8
    return 8 + config.top_k * (ids + values)


CHUNK_POSITIONS = 1024
"""Positions whose logits are in fp32 at once: 600 MB with a vocabulary of 150,000."""


SPEC = Objective(
    name="distill",
    keys=DistillConfig,
    build="trainctl.train.objectives.distillation:distill",
    reads=LOGITS,
    stored=(TEACHER,),
    whole_samples="",
    measures=("divergence", "cross_entropy"),
)
