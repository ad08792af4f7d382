"""Encode conversations and preference pairs as ids with loss marks, for a token store. No torch.

The ids of a preference pair are the prompt and the chosen answer, then the prompt and the rejected
answer. The two answers are marked, so the first half ends where the first run of marked ids ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import OnBadText
from trainctl.config.text.conversations import Learn
from trainctl.config.text.preferences import ANSWERS
from trainctl.data.chat_template import CannotRender, ChatTemplate
from trainctl.data.token_arrays import marked, marked_vocab_size
from trainctl.data.tokenizer import Encoder, Tokenizer
from trainctl.errors import TrainctlError
from trainctl.options.data.chat import ChatConfig
from trainctl.options.data.preferences import PreferencesConfig


def chat_encoder(section: ChatConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of a source's conversations.

    Raises:
        TrainctlError: There is no chat template.
    """
    return ChatEncoder(section, tokenizer)


class ChatEncoder:
    """An encoder of conversations, each as the JSON that `data=chat` makes of it.

    `vocab_size` bounds the ids with their marks (`data.token_arrays`).
    """

    end_of_document: int | None = None
    """None: the template writes what ends a conversation."""

    def __init__(self, section: ChatConfig, tokenizer: Tokenizer) -> None:
        self._template = template = ChatTemplate.of(
            tokenizer.file, section.chat_template, section.template_arguments
        )
        self._section, self._tokens = section, tokenizer.vocab_size
        self.vocab_size = marked_vocab_size(tokenizer.vocab_size)
        of = (tokenizer.fingerprint, template.fingerprint, section.learn.value)
        self.fingerprint = " ".join(of)

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the marked ids of each conversation.

        A conversation that `data.on_bad_text` leaves out has no ids.

        Raises:
            CannotRender: A conversation cannot be rendered and is not left out.
        """
        return [self._encoded(text) for text in texts]

    def _encoded(self, text: str) -> npt.NDArray[np.int64]:
        said = json.loads(text)
        try:
            found = self._template.render(said["messages"], said.get("tools"), self._section.learn)
        except CannotRender:
            if self._section.on_bad_text is not OnBadText.skip:
                raise
            return np.empty(0, dtype=np.int64)
        return marked(found.ids, found.loss_mask, self._tokens)


FORMAT = 1
"""Version of the encoding of pairs. Raising it has all pairs tokenized again."""


def preference_encoder(section: PreferencesConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of a source's pairs."""
    return PreferenceEncoder(section, tokenizer)


class PreferenceEncoder:
    """An encoder of pairs, each as the JSON that `data=preferences` makes of it.

    Plain texts are tokenized as they are. Prompt and answer are tokenized separately, as when the
    model answers, and the tokenizer's end-of-document id follows each answer. Messages are rendered
    by the chat template, and an answer is everything it adds to the prompt.

    `vocab_size` bounds the ids with their marks (`data.token_arrays`).
    """

    end_of_document: int | None = None
    """None: each answer already ends with the id."""

    def __init__(self, section: PreferencesConfig, tokenizer: Tokenizer) -> None:
        self._section, self._tokenizer = section, tokenizer
        self._template: ChatTemplate | None = None
        self._why_none: TrainctlError | None = None
        try:
            self._template = ChatTemplate.of(
                tokenizer.file, section.chat_template, section.template_arguments
            )
        except TrainctlError as error:  # plain texts need no template
            if section.chat_template is not None:
                raise
            self._why_none = error
        self.vocab_size = marked_vocab_size(tokenizer.vocab_size)
        template = self._template.fingerprint if self._template is not None else "none"
        self.fingerprint = f"pairs {FORMAT} {tokenizer.fingerprint} {template}"

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the marked ids of each pair; no ids for a pair that `data.on_bad_text` leaves out.

        Raises:
            TrainctlError: A pair cannot be encoded and is not left out; or messages have no chat
                template.
        """
        return [self._encoded(json.loads(text)) for text in texts]

    def _encoded(self, pair: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        write = self._of_texts if isinstance(pair["prompt"], str) else self._of_messages
        try:
            ids = [each for key in ANSWERS for each in write(pair, key)]
            if not all(map(len, ids)):
                raise CannotRender(
                    f"the tokenizer has no token for the prompt {pair['prompt']!r:.60} or for one "
                    "of its answers",
                    hint="correct the pair, or data.on_bad_text=skip, which leaves such out",
                )
        except CannotRender:
            if self._section.on_bad_text is not OnBadText.skip:
                raise
            return np.empty(0, dtype=np.int64)
        loss_mask = np.repeat([False, True, False, True], [len(each) for each in ids])
        return marked(np.concatenate(ids), loss_mask, self._tokenizer.vocab_size)

    def _of_texts(
        self, pair: Mapping[str, Any], key: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        answer, end = self._tokenizer.encode(pair[key]), self._tokenizer.end_of_document
        if end is not None and answer[-1:].tolist() != [end]:
            answer = np.append(answer, end)
        return self._tokenizer.encode(pair["prompt"]), answer

    def _of_messages(
        self, pair: Mapping[str, Any], key: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._template is None:
            assert self._why_none is not None
            raise self._why_none
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
