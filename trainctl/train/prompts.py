"""Prompts of a run's model: a text to continue, or a user's message in the chat template.

A continuation ends at the end of a document. An answer in a conversation also ends at any
end-of-turn token: the one that the template writes after an assistant's message, and those listed
in `generation_config.json` beside the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import DataConfig
from trainctl.data.chat_template import ChatTemplate
from trainctl.data.tokenizer import Tokenizer, stores_loss_mask
from trainctl.models.tokenizer_files import end_ids
from trainctl.options.data.chat import ChatConfig
from trainctl.options.data.preferences import PreferencesConfig
from trainctl.plan.mixture import sources_of


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encoder of prompts, with the ids that end a continuation."""

    tokenizer: Tokenizer
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
            return self.tokenizer.encode(text).tolist() or [0]
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids: list[int] = self.template.prompt(messages).tolist()
        return ids


def prompts_of(data: DataConfig, tokenizer: Tokenizer, *, chat: bool | None = None) -> Prompts:
    """Return the prompt encoder of a run.

    Args:
        chat: Whether prompts are a user's messages; None means True if the first source of the run
            has conversations.

    Raises:
        TrainctlError: A chat template is needed, and there is none.
    """
    end = tokenizer.end_of_document
    ends = frozenset(() if end is None else (end,))
    template = chat_template_of(data, tokenizer, chat=chat)
    if template is None:
        return Prompts(tokenizer, None, ends)
    assert tokenizer.file is not None
    return Prompts(tokenizer, template, ends | {*template.turn_ends, *end_ids(tokenizer.file)})


def chat_template_of(
    data: DataConfig, tokenizer: Tokenizer, *, chat: bool | None = None
) -> ChatTemplate | None:
    """Return the chat template of a run's conversations; None if it needs none.

    Args:
        chat: Whether a template is needed; None means True if the first source has conversations.

    Raises:
        TrainctlError: A template is needed, and there is none.
    """
    section = first_source(data)
    has_conversations = isinstance(section, ChatConfig) and stores_loss_mask(section)
    if not (has_conversations if chat is None else chat):
        return None
    if isinstance(section, ChatConfig | PreferencesConfig):
        named, arguments = section.chat_template, section.template_arguments
        return ChatTemplate.of(tokenizer.file, named, arguments)
    return ChatTemplate.of(tokenizer.file)


def first_source(data: DataConfig) -> DataConfig:
    """Return the section of the run's first source, which decides how prompts are written."""
    return next(iter(sources_of(data).values()))
