"""Scores that a model with a head of its own gives to texts of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainctl.config.schema import RunConfig
from trainctl.data.record_encoders import AnswerEncoder
from trainctl.data.token_arrays import loss_mask_of, without_marks
from trainctl.data.tokenizer import encoder_of, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.options.data import SampleKind
from trainctl.options.objective import objective_of
from trainctl.options.objective.classify import ClassifyConfig, Labelling
from trainctl.train.evaluation import first_source
from trainctl.train.models.loaded import LoadedModel


def scores_of(
    model: LoadedModel,
    config: RunConfig,
    prompt: str,
    answers: Sequence[str],
    *,
    chat: bool = False,
    classes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the scores of each answer to a prompt; without answers, of the prompt as a text.

    Each has the text and `scores` by name: `reward`; a probability for each class, or the numbers
    of a regression; or the probability of each step that it is right.

    Args:
        chat: Whether prompt and answers are messages, which the chat template renders.
        classes: Names of the classes, in the order of their numbers.

    Raises:
        TrainctlError: The model needs answers and there are none, or a text has no token.
    """
    takes = objective_of(config.objective).takes
    if takes in (SampleKind.pairs, SampleKind.steps) and not answers:
        raise TrainctlError("a reward is of an answer, and none is named", hint="--answer TEXT")
    found = []
    for text, record in _records(config, takes, prompt, answers, chat=chat):
        ids, marks = _encode(config, takes, record)
        if len(ids) > config.training.sequence_length:
            raise TrainctlError(
                f"{text!r:.60} has {len(ids):,} tokens, and the model was trained on "
                f"{config.training.sequence_length:,} (training.sequence_length)"
            )
        outputs = model.scores(ids)
        if takes is SampleKind.steps:
            chances = outputs[torch.tensor(marks), 0].sigmoid().tolist()
            scores = {f"step {n}": chance for n, chance in enumerate(chances, 1)}
        else:
            scores = _named(config, outputs[-1], classes)
        found.append({"text": text, "scores": scores})
    return found


def _records(
    config: RunConfig, takes: SampleKind, prompt: str, answers: Sequence[str], *, chat: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each text to score, with its record as the run's data source makes it."""
    if takes is SampleKind.pairs:
        for answer in answers:
            asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
            said: Any = [{"role": "assistant", "content": answer}] if chat else answer
            yield answer, {"prompt": asked, "completion": said, "label": True}
    elif takes is SampleKind.steps:
        separator = first_source(config.data).step_separator  # type: ignore[attr-defined]
        for answer in answers:
            steps = [step for step in answer.split(separator) if step]
            yield answer, {"prompt": prompt, "completions": steps, "labels": [0.0] * len(steps)}
    else:
        for second in answers or [""]:
            yield second or prompt, {"texts": [prompt, second] if second else [prompt], "label": []}


def _encode(
    config: RunConfig, takes: SampleKind, record: dict[str, Any]
) -> tuple[list[int], list[bool]]:
    """Return the ids of a record, and which of them are marked."""
    tokenizer, section = load_tokenizer(config.tokenizer), first_source(config.data)
    # One answer of a pair is written as a single answer is.
    is_pair = takes is SampleKind.pairs
    encoder: Any = AnswerEncoder if is_pair else encoder_of
    encoder = encoder(section, tokenizer)
    (marked,) = encoder.encode_all([json.dumps(record)])
    stored = marked.astype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    return without_marks(stored).tolist(), loss_mask_of(stored).tolist()


def _named(config: RunConfig, outputs: torch.Tensor, classes: Sequence[str]) -> dict[str, float]:
    """Return the outputs for a text by name, (outputs,)."""
    section = config.objective
    if not isinstance(section, ClassifyConfig):
        names = ["reward"] if len(outputs) == 1 else [str(n) for n in range(len(outputs))]
        return dict(zip(names, outputs.tolist(), strict=True))
    if section.problem is Labelling.single_label:
        outputs = outputs.softmax(dim=-1)
    elif section.problem is Labelling.multi_label:
        outputs = outputs.sigmoid()
    names = [*classes, *map(str, range(len(classes), len(outputs)))]
    return dict(zip(names, outputs.tolist(), strict=True))
