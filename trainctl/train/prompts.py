"""What a run's model is asked: a text to go on from, or a user's message by the chat template.

An answer ends at the end of a document, and, of a conversation, at whatever ends a turn: the token
that the template writes after what the assistant says, and those that `generation_config.json`
beside the tokenizer lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import DataConfig
from trainctl.config.special_tokens import end_ids
from trainctl.data.chat import ChatTemplate
from trainctl.data.encoding import marks_learnt
from trainctl.data.tokenizer import Tokenizer
from trainctl.options.data.chat import ChatConfig
from trainctl.options.data.preferences import PreferencesConfig
from trainctl.plan.mixture import sources_of


@dataclass(frozen=True, slots=True)
class Prompts:
    """How prompts become ids, and where what is drawn after them ends."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """The chat template that writes a prompt; None takes it as it stands."""
    ends: frozenset[int]
    """Ids, any of which ends what is drawn."""

    def ids(self, text: str, system: str | None = None) -> list[int]:
        """Those of a prompt: of the text, or of a user's message, with the prompt for an answer.

        Args:
            system: What the system says before it, of conversations.

        Raises:
            TrainctlError: The template refuses it.
        """
        if self.template is None:
            return self.tokenizer.encode(text).tolist() or [0]
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids: list[int] = self.template.prompt(messages).tolist()
        return ids


def prompts_of(data: DataConfig, tokenizer: Tokenizer, *, chat: bool | None = None) -> Prompts:
    """Those of a run.

    Args:
        chat: Whether prompts are a user's messages; None is so where the first source of the run
            has conversations.

    Raises:
        TrainctlError: It has to be so, and there is no chat template.
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
    """Return the chat template of a run, as its conversations are written; None where it has none.

    Args:
        chat: Whether it has to have one; None goes by the first source.

    Raises:
        TrainctlError: There is none, and there has to be.
    """
    section = first_source(data)
    has_conversations = isinstance(section, ChatConfig) and marks_learnt(section)
    if not (has_conversations if chat is None else chat):
        return None
    if isinstance(section, ChatConfig | PreferencesConfig):
        named, arguments = section.chat_template, section.template_arguments
        return ChatTemplate.of(tokenizer.file, named, arguments)
    return ChatTemplate.of(tokenizer.file)


def first_source(data: DataConfig) -> DataConfig:
    """Return the section of the first source of a run, by which it is asked."""
    return next(iter(sources_of(data).values()))
