"""Encode conversations and preference pairs as ids with loss marks, for a token store. No torch.

The ids of a preference pair are the prompt and the chosen answer, then the prompt and the rejected
answer. The two answers are marked, so the first half ends where the first run of marked ids ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import OnBadText
from trainctl.data.chat_template import CannotRender, ChatTemplate
from trainctl.data.targets import Targets
from trainctl.data.token_arrays import mark_tokens, marked_vocab_size
from trainctl.data.tokenizer import Tokenizer
from trainctl.errors import TrainctlError
from trainctl.options.data._records import TemplateConfig
from trainctl.options.data.chat import ChatConfig
from trainctl.readers.conversations import ANSWERS, Learn

PAIR_FORMAT = 2
"""Version of the encoding of pairs. Raising it has all pairs tokenized again."""

Ids = npt.NDArray[np.int64]
Section = TypeVar("Section", ChatConfig, TemplateConfig)


class _RecordEncoder(Generic[Section]):
    """Encoder of JSON records as ids with loss marks.

    `vocab_size` bounds the ids with their marks (`data.token_arrays`).
    """

    end_of_document: int | None = None
    """None: the template, or the end of an answer, already ends a record."""
    fingerprint: str

    def __init__(self, section: Section, tokenizer: Tokenizer) -> None:
        self._section: Section = section
        self._tokenizer = tokenizer
        self.vocab_size = marked_vocab_size(tokenizer.vocab_size)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Return the marked ids of each record; none for one that `data.on_bad_text` skips."""
        return [self._encode_or_skip(json.loads(text)) for text in texts]

    def _encode_or_skip(self, record: Mapping[str, Any]) -> Ids:
        try:
            ids, loss_mask = self._encode(record)
        except CannotRender:
            if self._section.on_bad_text is not OnBadText.skip:
                raise
            return np.empty(0, dtype=np.int64)
        return mark_tokens(ids, loss_mask, self._tokenizer.vocab_size)

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        raise NotImplementedError

    def targets(self, text: str) -> Targets:
        """Return the targets of a record; none unless its kind has some."""
        return ()

    def _load_template(self) -> ChatTemplate:
        section = self._section
        return ChatTemplate.of(
            self._tokenizer.file, section.chat_template, section.template_arguments
        )


class ChatEncoder(_RecordEncoder[ChatConfig]):
    """Encoder of conversations, each as the JSON that `data=chat` makes of it."""

    def __init__(self, section: ChatConfig, tokenizer: Tokenizer) -> None:
        super().__init__(section, tokenizer)
        self._template = self._load_template()
        parts = (tokenizer.fingerprint, self._template.fingerprint, section.learn.value)
        self.fingerprint = " ".join(parts)

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        found = self._template.render(record["messages"], record.get("tools"), self._section.learn)
        return found.ids, found.loss_mask


class PreferenceEncoder(_RecordEncoder[TemplateConfig]):
    """Encoder of pairs, each as the JSON that `data=preferences` makes of it.

    Plain texts are tokenized as they are. Prompt and answer are tokenized separately, as when the
    model answers, and the tokenizer's end-of-document id follows each answer. Messages are rendered
    by the chat template, and an answer is everything it adds to the prompt.
    """

    def __init__(self, section: TemplateConfig, tokenizer: Tokenizer) -> None:
        super().__init__(section, tokenizer)
        self._template: ChatTemplate | TrainctlError
        try:
            self._template = self._load_template()
        except TrainctlError as error:  # plain texts need no template
            if section.chat_template is not None:
                raise
            self._template = error
        found = self._template
        template = "none" if isinstance(found, TrainctlError) else found.fingerprint
        self.fingerprint = f"pairs {PAIR_FORMAT} {tokenizer.fingerprint} {template}"

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        encode = self._encode_texts if isinstance(record["prompt"], str) else self._encode_messages
        ids = [each for key in ANSWERS for each in encode(record, key)]
        if not all(map(len, ids)):
            raise CannotRender(
                f"the tokenizer has no token for the prompt {record['prompt']!r:.60} or for one "
                "of its answers",
                hint="correct the pair, or data.on_bad_text=skip, which leaves such out",
            )
        loss_mask = np.repeat([False, True, False, True], [len(each) for each in ids])
        return np.concatenate(ids), loss_mask

    def targets(self, text: str) -> Targets:
        """Return the margin of a pair that has one."""
        record = json.loads(text)
        return [record["margin"]] if "margin" in record else []

    def _encode_texts(self, pair: Mapping[str, Any], key: str) -> tuple[Ids, Ids]:
        answer, end = self._tokenizer.encode(pair[key]), self._tokenizer.end_of_document
        if end is not None and answer[-1:].tolist() != [end]:
            answer = np.append(answer, end)
        return self._tokenizer.encode(pair["prompt"]), answer

    def _encode_messages(self, pair: Mapping[str, Any], key: str) -> tuple[Ids, Ids]:
        if isinstance(self._template, TrainctlError):
            raise self._template
        tools = pair.get("tools")
        prompt = self._template.prompt(pair["prompt"], tools)
        whole = self._template.render([*pair["prompt"], *pair[key]], tools, Learn.all).ids
        if len(whole) <= len(prompt) or not np.array_equal(whole[: len(prompt)], prompt):
            raise CannotRender(
                f"the chat template writes the prompt of the {key} answer otherwise where the "
                "answer follows: which tokens are the answer's is not known",
                hint="another template in data.chat_template; or data.on_bad_text=skip, which "
                "leaves such pairs out",
            )
        return prompt, whole[len(prompt) :]
