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
    learn: Learn = option(
        Learn.assistant,
        "Tokens that contribute to the loss: all assistant messages, only the last one, or the "
        "whole conversation.",
    )


SPEC = source_of_records(
    "chat",
    lambda record, section: conversation_of(record, section.shape),
    identity=lambda section: section.shape.value,
    keys=ChatConfig,
    encoder="trainctl.data.record_encoders:ChatEncoder",
)
