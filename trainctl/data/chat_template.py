"""Convert conversations to token ids and loss masks with a chat template. No torch.

A template can mark the assistant's tokens itself, with `{% generation %}` blocks. Without such
blocks an answer is found by rendering with and without it. It lies between the beginnings that the
whole conversation shares with the messages before the answer, with the generation prompt, and with
those up to and including the answer. Beyond them these may have only what the template adds itself,
such as an opened `<think>` or an end of the conversation. A template that renders earlier turns
differently once others follow is refused, because the tokens of its answers are not known.

What a user or a tool says is plain text: the name of a special token in it is encoded as its
letters and cannot forge a turn. This also holds for any other added token that the template itself
writes: some tokenizers do not declare the tokens special that begin a turn. All other text (of the
assistant, the system, the schemas of tools) is encoded as the template's own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainctl.data.template_rendering import (
    CALLS,
    TOOLS,
    RefusedByTemplate,
    Spans,
    render,
    with_stand_in_name,
    with_stand_ins,
)
from trainctl.data.tokenizer import disable_truncation
from trainctl.errors import TrainctlError
from trainctl.models.tokenizer_files import (
    has_marks,
    read_chat_template,
    read_marked_template,
    special_tokens_of,
)
from trainctl.readers.conversations import Learn, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FORMAT = 3
"""Version of the encoding of conversations. Raising it has all conversations tokenized
again.
"""
_UNTRUSTED_ROLES = ("user", "tool")
"""Roles whose text is untrusted: no name in it becomes a special token, nor a token that the
template writes.
"""
_PLACEHOLDERS = range(0x100000, 0x10FFFE)
"""Private-use code points, which mean nothing in text: placeholders for special tokens'
names.
"""


class CannotRender(TrainctlError):
    """Error: a template refuses a conversation, or its rendering does not show the answers."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """An encoded conversation with its loss mask."""

    ids: Ids
    loss_mask: BoolArray
    """True for tokens that are labels, shape (tokens,)."""


@dataclass(frozen=True, slots=True)
class _RenderedText:
    """A rendered text, and the names of special tokens that messages contained as text."""

    text: str
    """The rendering, with a private-use character in place of each such name."""
    placeholders: Mapping[str, str]
    """Name of each such special token, by the private-use character that stands for it."""


class ChatTemplate:
    """A tokenizer with a chat template (Jinja), which encodes conversations.

    `has_marks` tells whether the assistant's tokens are marked: by the template itself, or by
    `marked`, the same template with marks. `arguments` are passed to the template beside the
    messages. `special_tokens` are the names `bos_token`, `eos_token` and so on with their values.
    `tokenizer` is a file of the tokenizers library.
    """

    def __init__(
        self,
        tokenizer: Path,
        source: str,
        special_tokens: Mapping[str, str],
        arguments: Mapping[str, Any] | None = None,
        marked: str | None = None,
    ) -> None:
        self._file, self.source, self._special_tokens = tokenizer, source, dict(special_tokens)
        self.arguments = dict(arguments or {})
        self._marked = source if marked is None else marked
        self.has_marks = has_marks(self._marked)

    @classmethod
    def of(
        cls,
        tokenizer: Path | None,
        named: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        marked: str | None = None,
    ) -> ChatTemplate:
        """Create the chat template of a tokenizer.

        `named` is the file of another template, or the name of one of several that the tokenizer
        has; None uses the tokenizer's own. `marked` is the file of the same template with marks.

        Raises:
            TrainctlError: The tokenizer has no file, there is no template, or none with marks.
        """
        source = read_chat_template(tokenizer, named)
        with_marks = None if marked is None else read_marked_template(marked)
        assert tokenizer is not None
        return cls(tokenizer, source, special_tokens_of(tokenizer), arguments, with_marks)

    @cached_property
    def _backend(self) -> Tokenizer:
        return _load_tokenizer(self._file)

    @cached_property
    def _plain(self) -> Tokenizer:
        """A second tokenizer, which encodes names of special tokens and of marks as text."""
        found = _load_tokenizer(self._file, self._marks.values())
        found.encode_special_tokens = True
        return found

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder().items()
        return {number: each.content for number, each in added if each.special}

    @cached_property
    def _marks(self) -> dict[int, str]:
        """Added tokens that the template writes but the tokenizer does not declare special."""
        added = self._backend.get_added_tokens_decoder().items()
        others = {number: each.content for number, each in added if not each.special}
        if not others:
            return {}
        written = self.source + "".join(self._probes)
        return {number: name for number, name in others.items() if name.strip() and name in written}

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Pattern that matches the name of any special token or mark, the longest first."""
        longest = sorted({*self._special.values(), *self._marks.values()}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @cached_property
    def _probes(self) -> list[str]:
        """Render two conversations that differ only in the answer; [] if one is refused."""
        texts = []
        for reply in "01":
            answer = [{"role": "user", "content": "0"}, {"role": "assistant", "content": reply}]
            try:
                texts.append(self._render_plain(answer))
            except CannotRender:
                return []
        return texts

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """Id of the token that ends an assistant turn, or () if the template writes none.

        It is the first token after the content that is special or a mark.
        """
        return self._after_content[:1]

    @cached_property
    def _after_content(self) -> tuple[int, ...]:
        """Ids of the tokens after an assistant's content that are special or marks."""
        texts = self._probes
        content = [n for n, pair in enumerate(zip(*texts, strict=False)) if len({*pair}) > 1]
        if not content:
            return ()
        ids, places = self._encode_text(_RenderedText(texts[0], {}))
        after = ids[places[:, 0] > content[-1]].tolist()
        return tuple(token for token in after if token in self._special or token in self._marks)

    @property
    def fingerprint(self) -> str:
        """Hash that changes whenever the same conversation could be encoded differently.

        It does not cover the tokenizer, which has its own fingerprint.
        """
        settings = [FORMAT, self.source, self._special_tokens]
        settings += [self.arguments] if self.arguments else []
        settings += [] if self._marked == self.source else [self._marked]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        learn: Learn = Learn.assistant,
        learned: Collection[int] | None = None,
    ) -> ChatTokens:
        """Encode a conversation and return its ids with the loss mask.

        No token is added to what the template writes. The token that ends an assistant turn
        has a loss if the template writes one: inside the `{% generation %}` block, or anywhere if
        there are no such blocks. `tools` are JSON schemas of the tools that may be called.
        `learned` has the numbers of the messages that may be learned; None allows all.

        Raises:
            CannotRender: The template refuses the conversation, its answers cannot be located, or
                there is nothing to learn.
        """
        self._require_calls(messages, tools)
        if len({*self._probes}) == 1:
            raise CannotRender(
                "the chat template leaves out what the assistant says",
                hint="a template that takes texts, in data.chat_template: this one may take parts "
                "of texts and images",
            )
        placeholders = self._find_placeholders(messages, tools)
        text, spans = self._render_text(messages, tools, placeholders, marks=self.has_marks)
        if self._marked != self.source:
            own, _ = self._render_text(messages, tools, placeholders)
            if own.text != text.text:
                raise CannotRender(
                    f"the template of data.learn writes {_conversation_in_words(messages)} "
                    "otherwise than the chat template",
                    hint="the chat template with nothing but {% generation %} and "
                    "{% endgeneration %} added",
                )
        ids, places = self._encode_text(text)
        if learn is Learn.all:
            return ChatTokens(ids, np.ones(len(ids), dtype=bool))
        every = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        answers = every[-1:] if learn is Learn.last else every
        answers = [n for n in answers if learned is None or n in learned]
        loss_mask = np.zeros(len(ids), dtype=bool)
        if self.has_marks:
            if answers != every:
                spans = self._spans_of(messages, tools, placeholders, spans, every, answers)
            found = [_token_range(places, *span) for span in spans]
        else:
            found = [self._answer_span(messages, tools, n, text, ids, places) for n in answers]
        for first, end in self._without_bare_ends(found, text.text, ids, places):
            loss_mask[first:end] = True
        if not loss_mask.any():
            raise CannotRender(f"nothing to learn in {_conversation_in_words(messages)}")
        return ChatTokens(ids, loss_mask)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Ids:
        """Encode messages that the assistant is to answer, followed by the generation prompt.

        Raises:
            CannotRender: The template refuses the messages.
        """
        self._require_calls(messages, tools)
        placeholders = self._find_placeholders(messages, tools)
        text, _ = self._render_text(messages, tools, placeholders, prompts=True)
        return self._encode_text(text)[0]

    def left_out(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> set[str]:
        """Return the kinds of fields in a conversation that the template does not write.

        A conversation that the template refuses is not looked at. Reasoning and tools are left out
        if none of them is written: many templates drop the reasoning of earlier turns.
        """
        kind_of: dict[str, str] = {}
        free = map(chr, _PLACEHOLDERS)

        def stand_in(kind: str) -> str:
            character = next(free)
            kind_of[character] = kind
            return character

        chat = [with_stand_ins(message, stand_in) for message in messages]
        schemas = [with_stand_in_name(each, TOOLS, stand_in) for each in tools or ()]
        try:
            text, _ = self._render_jinja(chat, schemas, prompts=False, marks=False)
        except CannotRender:
            return set()
        missing = {kind for character, kind in kind_of.items() if character not in text}
        written = {kind for character, kind in kind_of.items() if character in text}
        return missing - (written - {CALLS})

    def _require_calls(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Check that the template writes every tool call.

        Raises:
            CannotRender: It leaves some out: an answer would be learnt as if nothing were called.
        """
        if any(each.get("tool_calls") for each in messages) and CALLS in self.left_out(
            messages, tools
        ):
            raise CannotRender(
                f"the chat template leaves out {CALLS} of {_conversation_in_words(messages)}",
                hint="a template that writes them, in data.chat_template; or "
                "data.on_bad_text=skip, which leaves such conversations out",
            )

    def _spans_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        placeholders: Mapping[str, str],
        spans: Spans,
        every: Sequence[int],
        answers: Collection[int],
    ) -> Spans:
        """Return those of a conversation's marked spans that are in some of its answers.

        The spans of an answer are those behind the spans of the messages before it.

        Args:
            every: Numbers of all answers.
        """

        @cache
        def spans_before(number: int) -> int:
            return len(self._render_text(messages[:number], tools, placeholders, marks=True)[1])

        found: Spans = []
        for number, following in zip(every, [*every[1:], None], strict=True):
            if number in answers:
                end = len(spans) if following is None else spans_before(following)
                found += spans[spans_before(number) : end]
        return found

    def _answer_span(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        number: int,
        rendered: _RenderedText,
        ids: Ids,
        places: Ids,
    ) -> tuple[int, int]:
        """Return an answer's first token and one past its last.

        It begins where the rendering with it leaves the generation prompt, and ends where the
        rendering that ends with it leaves the whole. Each may differ only in what the template
        adds itself: the rest of the generation prompt, and tokens that end a conversation.

        Raises:
            CannotRender: They differ in more, or the answer's tokens run together with others.
        """
        whole, placeholders = rendered.text, rendered.placeholders
        before, _ = self._render_text(messages[:number], tools, placeholders, prompts=True)
        through_answer, _ = self._render_text(messages[: number + 1], tools, placeholders)
        prompt, _ = self._encode_text(before)
        first = _common_length(prompt, ids)
        if not through_answer.text.startswith(before.text):
            without, _ = self._render_text(messages[:number], tools, placeholders)
            fixed = len(commonprefix([without.text, before.text]))  # noqa: RUF071  characters
            is_known = first > 0 and places[first - 1, 1] >= fixed
        else:
            is_known = first == len(prompt)
        stop = len(through_answer.text)
        if not whole.startswith(through_answer.text):
            alone, its_places = self._encode_text(through_answer)
            end = _common_length(alone, ids)
            rest = through_answer.text[its_places[end, 0] :] if end < len(alone) else ""
            is_known &= not self._names.sub("", rest).strip()
            stop = places[end - 1, 1]
        end = _token_range(places, 0, stop)[1]
        if not is_known or end <= first:
            raise self._unknown_span(messages, number)
        special = np.flatnonzero(np.isin(ids[first:end], [*self._special, *self._marks]))
        if len(special):
            last = first + int(special[-1]) + 1
            if not whole[places[last - 1, 1] : stop].strip():
                end = last  # white space after the turn is not learnt
        return first, end

    def _without_bare_ends(
        self, spans: Sequence[tuple[int, int]], text: str, ids: Ids, places: Ids
    ) -> Iterator[tuple[int, int]]:
        """Yield the spans of answers, in tokens, but of those that are nothing but their end.

        Spans with nothing but white space between them are of one answer.
        """
        answers: list[list[tuple[int, int]]] = []
        for first, end in spans:
            before = places[answers[-1][-1][1] - 1, 1] if answers else 0
            if not answers or text[before : places[min(first, len(ids) - 1), 0]].strip():
                answers.append([])
            answers[-1].append((first, end))
        for answer in answers:
            tokens = (number for first, end in answer for number in range(first, end))
            if any(
                ids[number] not in self._after_content
                and text[places[number, 0] : places[number, 1]].strip()
                for number in tokens
            ):
                yield from answer

    def _unknown_span(self, messages: Sequence[Message], number: int) -> CannotRender:
        return CannotRender(
            f"the chat template writes message {number + 1:,} of "
            f"{_conversation_in_words(messages)} otherwise where it is the last one, "
            "or its tokens run together with those before it: which tokens are the answer's is not "
            "known",
            hint="data.learn=last if it does so with earlier turns alone; or data.learn=FILE, with "
            "the template with {% generation %} around what the assistant says",
        )

    def _find_placeholders(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, str]:
        """Return a placeholder for each name of a special token in untrusted texts.

        The names are collected once for the whole conversation, so that its prefixes are rendered
        with the same placeholders.
        """
        text = "\0".join(_texts_in([*messages, *(tools or ())]))
        untrusted = _texts_in([each for each in messages if each["role"] in _UNTRUSTED_ROLES])
        names = sorted({*self._names.findall("\0".join(untrusted))})
        free = (chr(point) for point in _PLACEHOLDERS if chr(point) not in text)
        return dict(zip(free, names, strict=False))

    def _render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        placeholders: Mapping[str, str],
        *,
        prompts: bool = False,
        marks: bool = False,
    ) -> tuple[_RenderedText, Spans]:
        """Render messages and return the text with the character spans that the template marks."""
        placeholder_of = {name: character for character, name in placeholders.items()}
        chat = [
            {
                key: each
                if key == "role"
                else _insert_placeholders(each, placeholder_of, self._names)
                for key, each in message.items()
            }
            if message["role"] in _UNTRUSTED_ROLES
            else message
            for message in messages
        ]
        text, spans = self._render_jinja(chat, tools or (), prompts=prompts, marks=marks)
        return _RenderedText(text, placeholders), spans

    def _render_plain(self, messages: Sequence[Message]) -> str:
        """Render messages that contain no names of tokens."""
        return self._render_jinja(messages, (), prompts=False, marks=False)[0]

    def _render_jinja(
        self,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompts: bool,
        marks: bool,
    ) -> tuple[str, Spans]:
        """Return the template's text, and the character spans that it marks.

        A template that refuses arguments of a tool call as an object gets them as JSON.

        Raises:
            CannotRender: The template refuses the conversation.
            TrainctlError: The template exceeds the limits on time, memory or length of text.
        """
        given = {**self.arguments, **self._special_tokens}
        source, refused = self._marked if marks else self.source, []
        with_text = [_with_arguments_as_text(message) for message in chat]
        for messages in (chat, with_text) if with_text != chat else (chat,):
            try:
                return render(source, messages, tools, given, prompts=prompts, marks=marks)
            except RefusedByTemplate as error:
                refused.append(error)
        raise CannotRender(
            f"the chat template cannot write {_conversation_in_words(chat)}: {refused[0]}",
            hint="correct the conversation, or data.on_bad_text=skip, which leaves such out; "
            "or another template in data.chat_template",
        )

    def _encode_text(self, text: _RenderedText) -> tuple[Ids, Ids]:
        """Return the ids of a text, (tokens,), and the span of each token in it, (tokens, 2)."""
        if not text.placeholders:
            found = self._backend.encode(text.text, add_special_tokens=False)
            return _int64_array(found.ids), _int64_array(found.offsets).reshape(-1, 2)
        ids, places, at = [_int64_array([])], [_int64_array([]).reshape(-1, 2)], 0
        for piece in re.split(f"([{''.join(text.placeholders)}])", text.text):
            if piece in text.placeholders:
                part = self._plain.encode(text.placeholders[piece], add_special_tokens=False).ids
                ids.append(_int64_array(part))
                places.append(np.tile([at, at + 1], (len(part), 1)))
            elif piece:
                found = self._backend.encode(piece, add_special_tokens=False)
                ids.append(_int64_array(found.ids))
                places.append(_int64_array(found.offsets).reshape(-1, 2) + at)
            at += len(piece)
        return np.concatenate(ids), np.concatenate(places)


def _load_tokenizer(file: Path, special: Collection[str] = ()) -> Tokenizer:
    """Load a tokenizer without truncation or padding; the named added tokens become special."""
    from tokenizers import Tokenizer

    text = file.read_text(encoding="utf-8")
    if special:
        plain = json.loads(text)
        for token in plain["added_tokens"]:
            token["special"] = token["special"] or token["content"] in special
        text = json.dumps(plain)
    found = Tokenizer.from_str(text)
    disable_truncation(found)
    return found


def _common_length(first: Ids, second: Ids) -> int:
    """Return the number of tokens with which both begin."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


def _token_range(places: Ids, start: int, end: int) -> tuple[int, int]:
    """Return the first token that overlaps a character span, and one past the last."""
    return int(np.searchsorted(places[:, 1], start, side="right")), int(
        np.searchsorted(places[:, 0], end, side="left")
    )


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)


def _insert_placeholders(
    value: Any, placeholder_of: Mapping[str, str], names: re.Pattern[str]
) -> Any:
    """Replace each name of a special token in a JSON value, keys included, by its placeholder."""
    if not placeholder_of:
        return value
    if isinstance(value, str):
        return names.sub(lambda match: placeholder_of[match[0]], value)
    if isinstance(value, Mapping):
        return {
            _insert_placeholders(key, placeholder_of, names): _insert_placeholders(
                each, placeholder_of, names
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_insert_placeholders(each, placeholder_of, names) for each in value]
    return value


def _with_arguments_as_text(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as JSON."""

    def encode(value: Any, key: str = "") -> Any:
        if key == "arguments" and isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, Mapping):
            return {name: encode(each, name) for name, each in value.items()}
        return [encode(each) for each in value] if isinstance(value, list) else value

    calls = message.get("tool_calls")
    return {**message, "tool_calls": encode(calls)} if calls else message


def _conversation_in_words(messages: Sequence[Message]) -> str:
    texts: Iterator[str] = (str(each.get("content") or "") for each in messages)
    first = next((text for text in texts if text), "")
    return f"the conversation that begins {first!r:.60}"


def _int64_array(numbers: Sequence[Any]) -> Ids:
    return np.asarray(numbers, dtype=np.int64)
