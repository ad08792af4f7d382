"""Prompts whose answers are sampled and rewarded: one prompt per document.

A sample is one prompt. The other columns of its record are kept for the rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.data._records import TemplateConfig, source_of_records
from trainctl.readers.conversations import prompt_of


@dataclass
class PromptsConfig(TemplateConfig):
    """Keys of prompts."""

    prompt_key: str = option(
        "prompt", "Key of the prompt in a record: a text, or a list of messages."
    )
    as_message: bool = option(
        False,
        "Make a prompt that is a text a message of the user, which the chat template renders; "
        "otherwise it is tokenized as it is.",
    )


def _read_record(record: Any, section: PromptsConfig) -> dict[str, Any]:
    found = prompt_of(record, section.prompt_key)
    if section.as_message and isinstance(found["prompt"], str):
        found["prompt"] = [{"role": "user", "content": found["prompt"]}]
    return found


SPEC = source_of_records(
    "prompts",
    _read_record,
    identity=lambda section: f"{section.prompt_key} {section.as_message}",
    keys=PromptsConfig,
    encoder="trainctl.data.record_encoders:PromptEncoder",
    gives=SampleKind.prompts,
)
