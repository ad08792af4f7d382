"""Conversations to token ids, and which of them are learnt, by a chat template. No torch.

Which tokens are the assistant's a template may say itself, by `{% generation %}` blocks. Where it
has none they are found by prefixes: what the template makes of the messages before an answer, with
its generation prompt, has to begin what it makes of all; so has what it makes of the messages up to
and with the answer. The answer is between the two, with the token that ends its turn. A template
that writes earlier turns otherwise once others follow is refused: nobody knows what to learn then.

What a user types is text: where it has the name of a special token, it becomes the ids of its
letters, and forges no turn. So does, of a user or a tool, the name of any other added token that
the template writes itself: some tokenizers do not call the tokens special that begin a turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainctl.config.chat_template import special_tokens_of, template_of
from trainctl.config.text.conversations import Learn, Message
from trainctl.data.template_rendering import RefusedByTemplate, Spans, render
from trainctl.data.tokenizer import take_limits
from trainctl.errors import TrainctlError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]
Learnt = npt.NDArray[np.bool_]

FORMAT = 2
"""Of what is made of a conversation: another one is tokenized again."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TYPING = ("user", "tool")
"""Roles that say what nobody has looked at: what they say writes none of the template's tokens."""
_PRIVATE = range(0x100000, 0x10FFFE)
"""Characters that no text has a meaning for: they stand for the names of special tokens in it."""


class CannotRender(TrainctlError):
    """A template does not make a text of a conversation, or not one whose answers are known."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A conversation as a model sees it."""

    ids: Ids
    """Its tokens, (tokens,)."""
    learnt: Learnt
    """Which of them are learnt, (tokens,)."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text that was rendered, with what was typed in it."""

    text: str
    """It, with a private character in place of each name of a special token."""
    typed: Mapping[str, str]
    """Those names, by their characters."""


class ChatTemplate:
    """A tokenizer and a template, for one conversation after the other.

    Attributes:
        source: The template, in Jinja.
        arguments: What it is given beside the messages, by name.
        has_marks: Whether the template says itself what the assistant's tokens are.

    Args:
        tokenizer: A file of the tokenizers library.
        source: The template, in Jinja.
        special_tokens: What templates call `bos_token`, `eos_token` and so on.
        arguments: What the template is given beside the messages, by name.
    """

    def __init__(
        self,
        tokenizer: Path,
        source: str,
        special_tokens: Mapping[str, str],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._file, self.source, self._special_tokens = tokenizer, source, dict(special_tokens)
        self.arguments = dict(arguments or {})
        self.has_marks = bool(_MARK.search(source))

    @classmethod
    def of(
        cls,
        tokenizer: Path | None,
        named: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """That of a tokenizer's files, or one that is named.

        Args:
            tokenizer: Its file; None for one that has none.
            named: File of another template; None is the tokenizer's own.
            arguments: What it is given beside the messages, by name.

        Raises:
            TrainctlError: There is none.
        """
        source = template_of(tokenizer, named)
        assert tokenizer is not None
        return cls(tokenizer, source, special_tokens_of(tokenizer), arguments)

    @cached_property
    def _backend(self) -> Tokenizer:
        return _loaded(self._file)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same, to which the name of a special token, or of a mark, is text."""
        found = _loaded(self._file, self._marks.values())
        found.encode_special_tokens = True
        return found

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder().items()
        return {number: each.content for number, each in added if each.special}

    @cached_property
    def _marks(self) -> dict[int, str]:
        """Tokens that the template writes, and that the tokenizer does not call special."""
        added = self._backend.get_added_tokens_decoder().items()
        others = {number: each.content for number, each in added if not each.special}
        if not others:
            return {}
        written = self.source + "".join(self._probes())
        return {number: name for number, name in others.items() if name.strip() and name in written}

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Any special token's name, the longest first."""
        return _any_of(self._special.values())

    @cached_property
    def _names_and_marks(self) -> re.Pattern[str]:
        """Any special token's name, or a mark's."""
        return _any_of([*self._special.values(), *self._marks.values()])

    def _probes(self) -> list[str]:
        """What the template makes of an answer, and of another one; nothing if it refuses both."""
        texts = []
        for said in "01":
            answer = [{"role": "user", "content": "0"}, {"role": "assistant", "content": said}]
            try:
                texts.append(self._written(answer))
            except CannotRender:
                return []
        return texts

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The token that ends a turn of the assistant: the first after its content that is special
        or a mark; none if the template writes none."""
        texts = self._probes()
        content = [n for n, said in enumerate(zip(*texts, strict=False)) if len({*said}) > 1]
        if not content:
            return ()
        ids, places = self._encoded(_Text(texts[0], {}))
        after = ids[places[:, 0] > content[-1]].tolist()
        return tuple(token for token in after if token in self._special or token in self._marks)[:1]

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same conversation could give other ids, beside the tokenizer's."""
        settings = [FORMAT, self.source, self._special_tokens]
        settings += [self.arguments] if self.arguments else []
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        learn: Learn = Learn.assistant,
    ) -> ChatTokens:
        """Return a conversation's ids, and which of them are learnt.

        No token is added to what the template writes. The token that ends a turn of the assistant
        is learnt with it, if the template writes one: in a `{% generation %}` block, or at all
        where it has none.

        Args:
            tools: JSON schemas of the tools that may be called.
            learn: Which tokens.

        Raises:
            CannotRender: The template refuses the conversation, or does not show its answers; or
                there is nothing to learn.
        """
        typed = self._typed(messages, tools)
        text, spans = self._rendered(messages, tools, typed, marks=self.has_marks)
        ids, places = self._encoded(text)
        if learn is Learn.all:
            return ChatTokens(ids, np.ones(len(ids), dtype=bool))
        answers = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        if learn is Learn.last:
            del answers[:-1]
        learnt = np.zeros(len(ids), dtype=bool)
        if self.has_marks:
            if learn is Learn.last and answers:
                _, earlier = self._rendered(messages[: answers[0]], tools, typed, marks=True)
                del spans[: len(earlier)]
            found = [_tokens(places, *span) for span in spans]
        else:
            found = [self._answer(messages, tools, n, text, ids, places) for n in answers]
        for first, end in found:
            learnt[first:end] = True
        if not learnt.any():
            raise CannotRender(f"nothing to learn in {_in_words(messages)}")
        return ChatTokens(ids, learnt)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Ids:
        """Ids of messages that the assistant is to answer, with the template's prompt for that.

        Raises:
            CannotRender: The template refuses them.
        """
        typed = self._typed(messages, tools)
        text, _ = self._rendered(messages, tools, typed, prompts=True)
        return self._encoded(text)[0]

    def _answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        number: int,
        rendered: _Text,
        ids: Ids,
        places: Ids,
    ) -> tuple[int, int]:
        """First token of an answer and one past its last, by what comes before and with it."""
        whole, typed = rendered.text, rendered.typed
        before, _ = self._rendered(messages[:number], tools, typed, prompts=True)
        through, _ = self._rendered(messages[: number + 1], tools, typed)
        if not through.text.startswith(before.text) or not whole.startswith(through.text):
            raise self._no_prefix(messages, number)
        prompt, _ = self._encoded(before)
        first, end = _tokens(places, len(before.text), len(through.text))
        if first != len(prompt) or not np.array_equal(ids[:first], prompt):
            raise self._no_prefix(messages, number)
        special = np.flatnonzero(np.isin(ids[first:end], [*self._special, *self._marks]))
        if len(special):
            last = first + int(special[-1]) + 1
            if not whole[places[last - 1, 1] : len(through.text)].strip():
                end = last  # what follows the end of the turn is nobody's
        return first, end

    def _no_prefix(self, messages: Sequence[Message], number: int) -> CannotRender:
        return CannotRender(
            f"the chat template writes message {number + 1:,} of {_in_words(messages)} otherwise "
            "where it is the last one, or its tokens run together with those before it: which "
            "tokens are the answer's is not known",
            hint="data.learn=last if it does so with earlier turns alone; or a template with "
            "{% generation %} around what the assistant says, in data.chat_template",
        )

    def _typed(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, str]:
        """Return the names of special tokens that a conversation has in its texts, by what stands
        there.

        Found once for all of it: its beginnings are then written as the whole is.
        """
        said = "\0".join(_texts_in([*messages, *(tools or ())]))
        typed = "\0".join(_texts_in([each for each in messages if each["role"] in _TYPING]))
        names = sorted({*self._names.findall(said), *self._names_and_marks.findall(typed)})
        free = (chr(point) for point in _PRIVATE if chr(point) not in said)
        return dict(zip(free, names, strict=False))

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        typed: Mapping[str, str],
        *,
        prompts: bool = False,
        marks: bool = False,
    ) -> tuple[_Text, Spans]:
        """What the template makes of messages, and the spans of characters that it marks."""
        standing = {name: character for character, name in typed.items()}

        def plain(value: Any, names: re.Pattern[str]) -> Any:
            return _without_names(value, standing, names)

        chat = [
            {
                key: each if key == "role" else plain(each, self._names_of(message))
                for key, each in message.items()
            }
            for message in messages
        ]
        shown = [plain(each, self._names) for each in tools or ()]
        text, spans = self._by_jinja(chat, shown, prompts=prompts, marks=marks)
        return _Text(text, typed), spans

    def _names_of(self, message: Message) -> re.Pattern[str]:
        """What is text in a message, whatever it is called."""
        return self._names_and_marks if message["role"] in _TYPING else self._names

    def _written(self, messages: Sequence[Message]) -> str:
        """What the template makes of messages that have no names of tokens in them."""
        return self._by_jinja(messages, (), prompts=False, marks=False)[0]

    def _by_jinja(
        self,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompts: bool,
        marks: bool,
    ) -> tuple[str, Spans]:
        """Return the template's text, and the spans of characters that it marks.

        Raises:
            CannotRender: It refuses the conversation.
            TrainctlError: It takes more time, memory or text than any template needs.
        """
        given = {**self.arguments, **self._special_tokens}
        try:
            return render(self.source, chat, tools, given, prompts=prompts, marks=marks)
        except RefusedByTemplate as error:
            raise CannotRender(
                f"the chat template cannot write {_in_words(chat)}: {error}",
                hint="correct the conversation, or data.on_bad_text=skip, which leaves such out; "
                "or another template in data.chat_template",
            ) from None

    def _encoded(self, text: _Text) -> tuple[Ids, Ids]:
        """Ids of a text, (tokens,), and where each begins and ends in it, (tokens, 2)."""
        if not text.typed:
            found = self._backend.encode(text.text, add_special_tokens=False)
            return _array(found.ids), _array(found.offsets).reshape(-1, 2)
        ids, places, at = [_array([])], [_array([]).reshape(-1, 2)], 0
        for piece in re.split(f"([{''.join(text.typed)}])", text.text):
            if piece in text.typed:
                part = self._plain.encode(text.typed[piece], add_special_tokens=False).ids
                ids.append(_array(part))
                places.append(np.tile([at, at + 1], (len(part), 1)))
            elif piece:
                found = self._backend.encode(piece, add_special_tokens=False)
                ids.append(_array(found.ids))
                places.append(_array(found.offsets).reshape(-1, 2) + at)
            at += len(piece)
        return np.concatenate(ids), np.concatenate(places)


def _loaded(file: Path, special: Collection[str] = ()) -> Tokenizer:
    """Return a tokenizer that gives all of a text; added tokens that are named are special to
    it."""
    from tokenizers import Tokenizer

    text = file.read_text(encoding="utf-8")
    if special:
        said = json.loads(text)
        for token in said["added_tokens"]:
            token["special"] = token["special"] or token["content"] in special
        text = json.dumps(said)
    found = Tokenizer.from_str(text)
    take_limits(found)
    return found


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of names, the longest first."""
    longest = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


def _tokens(places: Ids, start: int, end: int) -> tuple[int, int]:
    """Return the first token that has a character of a span, and one past the last."""
    return int(np.searchsorted(places[:, 1], start, side="right")), int(
        np.searchsorted(places[:, 0], end, side="left")
    )


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text of a value of JSON, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)


def _without_names(value: Any, standing: Mapping[str, str], names: re.Pattern[str]) -> Any:
    """Return the same with a character in place of each name of a special token, in keys too."""
    if not standing:
        return value
    if isinstance(value, str):
        return names.sub(lambda match: standing[match[0]], value)
    if isinstance(value, Mapping):
        return {
            _without_names(key, standing, names): _without_names(each, standing, names)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_names(each, standing, names) for each in value]
    return value


def _in_words(messages: Sequence[Message]) -> str:
    """Return a conversation, by how it begins."""
    texts: Iterator[str] = (str(each.get("content") or "") for each in messages)
    first = next((text for text in texts if text), "")
    return f"the conversation that begins {first!r:.60}"


def _array(numbers: Sequence[Any]) -> Ids:
    return np.asarray(numbers, dtype=np.int64)
