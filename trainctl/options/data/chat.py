"""Conversations, in any of the published shapes: one conversation per document.

They are packed whole and do not attend to each other. The loss is on the assistant's tokens, unless
`data.learn` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.data._records import TemplateConfig, source_of_records
from trainctl.readers.conversations import Learn, Shape, conversation_of


@dataclass
class ChatConfig(TemplateConfig):
    """Keys of conversations."""

    shape: Shape = option(
        Shape.auto,
        "Format of a conversation record: messages, prompt (and completion), alpaca or sharegpt; "
        "auto infers it from the record's keys.",
    )
    learn: str = option(
        Learn.assistant.value,
        "Tokens that contribute to the loss: assistant (all its messages), last (its last one), "
        "all (the whole conversation), or what a file of Jinja marks: the chat template with "
        "`{% generation %}` around what the assistant says.",
        local=True,
    )
    learn_key: str | None = option(
        None,
        "Key of a message that says whether one of the assistant's is learned: 0 or false is not, "
        "1 or true is, as is one without the key. None takes `weight`, `train` or `loss` where "
        "one of them is 0 or false at an answer; an empty key learns all.",
        needs=(lambda s: s.learn != Learn.all.value, "data.learn=assistant or last"),
    )


SPEC = source_of_records(
    "chat",
    lambda record, section: conversation_of(record, section.shape, section.learn_key),
    identity=lambda section: " ".join(
        [section.shape.value, *([] if section.learn_key is None else [section.learn_key or "''"])]
    ),
    keys=ChatConfig,
    encoder="trainctl.data.record_encoders:ChatEncoder",
    begins_texts=False,
)
