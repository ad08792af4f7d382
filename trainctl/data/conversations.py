"""Conversations to marked ids, as a store has them of its documents. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import OnBadText
from trainctl.data.chat import CannotRender, ChatTemplate
from trainctl.data.encoding import Encoder
from trainctl.data.loss_marks import marked, with_mark
from trainctl.data.tokenizer import Tokenizer
from trainctl.options.data.chat import ChatConfig


def encoder_of(section: ChatConfig, tokenizer: Tokenizer) -> Encoder:
    """What makes marked ids of a source's conversations.

    Raises:
        TrainctlError: There is no chat template.
    """
    return ChatEncoder(section, tokenizer)


class ChatEncoder:
    """An encoder of conversations, each as the JSON that `data=chat` makes of it.

    Attributes:
        vocab_size: Ids are below it, with their marks (`data.marks`).
        fingerprint: Changes whenever the same conversation could give other ids, or marks.
    """

    end_of_document: int | None = None
    """None: what ends a conversation its template writes."""

    def __init__(self, section: ChatConfig, tokenizer: Tokenizer) -> None:
        self._template = template = ChatTemplate.of(
            tokenizer.file, section.chat_template, section.template_arguments
        )
        self._section, self._tokens = section, tokenizer.vocab_size
        self.vocab_size = with_mark(tokenizer.vocab_size)
        of = (tokenizer.fingerprint, template.fingerprint, section.learn.value)
        self.fingerprint = " ".join(of)

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Marked ids of each conversation; none where it is left out, by `data.on_bad_text`.

        Raises:
            CannotRender: By the policy.
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
