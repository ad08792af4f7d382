"""Encode conversations as marked ids, in the form that a store has for documents. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import OnBadText
from trainctl.data.chat import CannotRender, ChatTemplate
from trainctl.data.encoding import Encoder
from trainctl.data.loss_marks import marked, marked_vocab_size
from trainctl.data.tokenizer import Tokenizer
from trainctl.options.data.chat import ChatConfig


def encoder_of(section: ChatConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of a source's conversations.

    Raises:
        TrainctlError: There is no chat template.
    """
    return ChatEncoder(section, tokenizer)


class ChatEncoder:
    """An encoder of conversations, each as the JSON that `data=chat` makes of it.

    `vocab_size` bounds the ids with their marks (`data.loss_marks`).
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
        return marked(found.ids, found.learnt, self._tokens)
