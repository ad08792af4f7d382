"""Held-out loss, prompts and sampled text, of the engine's model or of a model outside training.

The model is given as a function: from a batch to its loss, or from token ids to the scores of the
next token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from trainctl.config.schema import DataConfig
from trainctl.data.chat_template import ChatTemplate
from trainctl.data.corpus_record import Corpus
from trainctl.data.record_encoders import gives_messages
from trainctl.data.tokenizer import Tokenizer, encode_prompt
from trainctl.engines.micro_batch import MicroBatch
from trainctl.errors import TrainctlError
from trainctl.models.tokenizer_files import end_ids
from trainctl.options.data._records import TemplateConfig
from trainctl.options.data.prompts import PromptsConfig
from trainctl.options.objective import objective_of
from trainctl.plans.mixture import sources_of
from trainctl.plans.types import RunPlan
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.data import PackedDataset

Score = Callable[[Sequence[MicroBatch]], tuple[float, ...]]
"""Function from micro-batches to their summed loss, the number of labels (or records) that the loss
is summed over, and the sums of the objective's measures.
"""

NextScores = Callable[[list[int]], torch.Tensor]
"""Function from token ids to the logits of the next token, (vocabulary,) in fp32 on the CPU."""


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without autograd; set the module to train mode afterwards."""
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train()


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Held-out loss of a run's sources."""

    loss: float
    """Mean over the labels (or records) of all sources; nats per token for a cross entropy."""
    sources: dict[str, float]
    """Mean loss of each source that has held-out samples."""
    samples: int
    """Number of samples evaluated, over all sources."""
    measures: dict[str, float]
    """Numbers that the objective records beside its loss, over all sources."""


def evaluate_sources(
    score: Score,
    datasets: Mapping[str, PackedDataset],
    *,
    num_samples: int,
    record: Callable[[Sequence[float], float], dict[str, float]] = lambda sums, number: {},
    sum_over_ranks: Callable[..., list[float]] = lambda *values: list(values),
    progress: OnUnits = ignore_progress,
    **how: int,
) -> HeldOutLoss | None:
    """Return the mean loss over the first held-out samples of each source; None without samples.

    Args:
        num_samples: Most samples of a source. Every rank runs the same number of forward passes
            (ZeRO-3 gathers parameters in each); without samples left it runs padding.
        record: Function from the sums of the objective's measures and the number of labels (or
            records) to what is recorded.
        sum_over_ranks: Returns each of its arguments summed over the processes that share the
            samples.
        progress: Called with the samples done and their total over all sources.
        how: `micro_batch_size`, and `micro_batches` of a rank that are scored together; index
            `data_rank` of this process among the `data_size` ones that share the samples.
    """
    counts = {name: min(num_samples, data.num_samples) for name, data in datasets.items()}
    whole, before = sum(counts.values()), 0
    sums: dict[str, list[float]] = {}

    def report(start: int, done: int) -> None:
        progress(start + done, whole)

    for name, count in counts.items():
        if count:
            sums[name] = _sum_over_samples(
                score,
                datasets[name],
                count,
                sum_over_ranks=sum_over_ranks,
                progress=partial(report, before),
                **how,
            )
            before += count
    if not sums:
        return None
    total, number, *measured = (sum(column) for column in zip(*sums.values(), strict=True))
    of_each = {name: loss / labels for name, (loss, labels, *_) in sums.items()}
    return HeldOutLoss(total / number, of_each, whole, record(measured, number))


def scored_together(plan: RunPlan, data_size: int) -> int:
    """Return the number of micro-batches of a rank that are scored together.

    If the loss of a record depends on the others in its batch, an evaluation batch has as many
    consecutive samples as the global batch.

    Args:
        data_size: Number of processes that share the samples, which may not be the plan's.
    """
    if objective_of(plan.config.objective).passes == 1:
        return 1
    return plan.batch.global_batch_size // (plan.batch.micro_batch_size * data_size)


def _sum_over_samples(
    score: Score,
    dataset: PackedDataset,
    count: int,
    *,
    micro_batch_size: int,
    micro_batches: int = 1,
    data_rank: int = 0,
    data_size: int = 1,
    sum_over_ranks: Callable[..., list[float]],
    progress: Callable[[int], None],
) -> list[float]:
    """Return sums over the first `count` samples and all ranks: loss, labels, measures."""
    found = []
    shape = micro_batches, data_size, micro_batch_size
    for start in range(0, count, math.prod(shape)):
        progress(start)
        indices = start + np.arange(math.prod(shape)).reshape(shape)
        indices = indices[indices[:, 0, 0] < count]  # the same number of passes on every rank
        own = np.where(indices < count, indices, -1)[:, data_rank]
        found.append(score([dataset.micro_batch(each) for each in own]))
    progress(count)
    return sum_over_ranks(*(sum(column) for column in zip(*found, strict=True)))


def sampled_ids(
    next_scores: NextScores,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    window: int,
    seed: int,
    vocab_size: int,
    ends: Collection[int] = (),
    temperature: float = 0.8,
    progress: OnUnits = ignore_progress,
) -> list[int]:
    """Return the ids of a sampled continuation of `prompt`, without the prompt.

    All ranks call it together and draw the same tokens (ZeRO-3 gathers parameters in each pass).

    Args:
        num_tokens: Most tokens to draw.
        window: Tokens of context in a forward pass.
        vocab_size: Number of ids to draw from; scores beyond it are ignored.
        ends: Ids that end the continuation; they are not returned.
        temperature: Divides the logits; 0 decodes greedily.
        progress: Called with the tokens drawn and `num_tokens`.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for drawn in range(num_tokens):
        progress(drawn, num_tokens)
        scores = next_scores(ids[-window:])[:vocab_size]
        if temperature == 0:
            token = int(scores.argmax())
        else:
            probabilities = (scores / temperature).softmax(dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encoder of prompts, with the ids that end a continuation.

    A prompt is a text to continue, or a user's message in the chat template. A continuation ends at
    the end of a document. An answer in a conversation also ends at any end-of-turn token: the one
    that the template writes after an assistant's message, and those listed in
    `generation_config.json` beside the tokenizer.
    """

    tokenizer: Tokenizer
    section: DataConfig
    """The source that decides what a plain text begins with."""
    template: ChatTemplate | None
    """Chat template of the prompts; None encodes them as plain text."""
    ends: frozenset[int]
    """Ids that end a continuation."""

    def ids(self, text: str, system: str | None = None) -> list[int]:
        """Return the ids of a prompt: plain text, or a user's message and the generation prompt.

        Args:
            system: System message, with a chat template only.

        Raises:
            TrainctlError: The template refuses the messages.
        """
        if self.template is None:
            return self.text_ids(text)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.template.prompt(messages).tolist()

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a plain text, at least one."""
        return encode_prompt(self.section, self.tokenizer, text).tolist() or [0]


def is_chat(data: DataConfig, corpora: Mapping[str, Corpus]) -> bool:
    """Return True if the first source of a run has messages, by the run's record of its corpora or
    by the files as they are now.
    """
    recorded = corpora.get(next(iter(sources_of(data))))
    section = first_source(data)
    return (recorded is not None and recorded.has_messages) or gives_messages(section)


def prompts_of(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    chat: bool | None = None,
    corpora: Mapping[str, Corpus] = MappingProxyType({}),
) -> Prompts:
    """Return the prompt encoder of a run.

    Args:
        chat: Whether prompts are a user's messages; None means True if the first source of the run
            has messages (`is_chat`).
        corpora: The run's record of its corpora, by source.

    Raises:
        TrainctlError: A chat template is needed, and there is none.
    """
    end, section, template = tokenizer.end_of_document, first_source(data), None
    ends = frozenset(() if end is None else (end,))
    needs_template = is_chat(data, corpora) if chat is None else chat
    if needs_template and isinstance(section, TemplateConfig):
        named, arguments = section.chat_template, section.template_arguments
        template = ChatTemplate.of(tokenizer.file, named, arguments)
    elif needs_template:
        template = ChatTemplate.of(tokenizer.file)
    if template is not None:
        assert tokenizer.file is not None
        ends |= {*template.turn_ends, *end_ids(tokenizer.file)}
    elif chat is None and isinstance(section, PromptsConfig) and tokenizer.file:
        ends |= {*end_ids(tokenizer.file)}
        with suppress(TrainctlError):  # without a template no record has messages
            ends |= prompts_of(data, tokenizer, chat=True).ends
    return Prompts(tokenizer, section, template, ends)


def first_source(data: DataConfig) -> DataConfig:
    """Return the section of the run's first source, which decides how prompts are written."""
    return next(iter(sources_of(data).values()))
