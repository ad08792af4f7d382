"""Encode records as ids with loss marks, and their targets, for a token store. No torch.

| record of | ids | marked | targets |
|---|---|---|---|
| `chat` | the conversation | what is learned | |
| `preferences` | prompt, chosen answer, prompt, rejected answer | the answers | margin, if any |
| `answers` | prompt, answer | the answer | 1 if it is good, else 0 |
| `labelled` | the text, or the two texts | | its label |
| `prompts` | the prompt | | |
| `steps` | prompt, steps | the last token of each step | a label for each step |
| `similar` | query, positive, negatives | the first token of each text but the query | |

So marks tell where the documents of a record end (`trainctl.train.data`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import BeginDocuments, DataConfig, DataFromPaths, OnBadText
from trainctl.data.chat_template import CannotRender, ChatTemplate
from trainctl.data.targets import Targets
from trainctl.data.token_arrays import mark_tokens, marked_vocab_size
from trainctl.data.tokenizer import Tokenizer, encode_prompt
from trainctl.errors import TrainctlError
from trainctl.options.data._records import TemplateConfig
from trainctl.options.data.chat import ChatConfig
from trainctl.options.data.prompts import PromptsConfig
from trainctl.options.data.steps import StepsConfig
from trainctl.readers.conversations import ANSWERS, Learn
from trainctl.readers.documents import Reader
from trainctl.readers.files import split_files

RECORD_FORMAT = 2
"""Version of the encoding of records other than conversations. Raising it has all of them tokenized
again.
"""

Ids = npt.NDArray[np.int64]
Section = TypeVar("Section", bound=DataFromPaths)


class _RecordEncoder(Generic[Section]):
    """Encoder of JSON records as ids with loss marks.

    `vocab_size` bounds the ids with their marks (`data.token_arrays`).
    """

    begin_of_document: tuple[int, ...] = ()
    end_of_document: int | None = None
    """None: the record has what begins and ends it."""
    fingerprint: str

    def __init__(self, section: Section, tokenizer: Tokenizer) -> None:
        self._section: Section = section
        self._tokenizer = tokenizer
        self.vocab_size = marked_vocab_size(tokenizer.vocab_size)

    def _encode_prompt(self, text: str) -> Ids:
        return encode_prompt(self._section, self._tokenizer, text)

    def _begin_identity(self) -> str:
        """Return the part of the fingerprint that is what prompts begin with; often empty."""
        begins = self._section.begin_documents is BeginDocuments.tokenizer
        begin = self._tokenizer.begin_of_text if begins else ()
        return f" begin {begin}" if begin else ""

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Return the marked ids of each record; none for one that `data.on_bad_text` skips."""
        return [self._encode_or_skip(json.loads(text)) for text in texts]

    def _encode_or_skip(self, record: Mapping[str, Any]) -> Ids:
        try:
            ids, loss_mask = self._encode(record)
        except CannotRender:
            if self._section.on_bad_text is not OnBadText.skip:
                raise
            return np.empty(0, dtype=np.int64)
        return mark_tokens(ids, loss_mask, self._tokenizer.vocab_size)

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        raise NotImplementedError

    def targets(self, text: str) -> Targets:
        """Return the targets of a record; none unless its kind has some."""
        return ()


class ChatEncoder(_RecordEncoder[ChatConfig]):
    """Encoder of conversations, each as the JSON that `data=chat` makes of it."""

    def __init__(self, section: ChatConfig, tokenizer: Tokenizer) -> None:
        super().__init__(section, tokenizer)
        is_file = section.learn not in {each.value for each in Learn}
        self._learn = Learn.assistant if is_file else Learn(section.learn)
        self._template = _load_template(section, tokenizer, section.learn if is_file else None)
        parts = (tokenizer.fingerprint, self._template.fingerprint, self._learn.value)
        self.fingerprint = " ".join(parts)

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        messages, tools = record["messages"], record.get("tools")
        found = self._template.render(messages, tools, self._learn, record.get("learned"))
        return found.ids, found.loss_mask


class _AnswersEncoder(_RecordEncoder[TemplateConfig]):
    """Encoder of a prompt with the answers under `keys`, each after the prompt.

    Plain texts are tokenized as they are, after what the tokenizer puts before a text. Prompt and
    answer are tokenized separately, as when the model answers, and the tokenizer's end-of-document
    id follows each answer. Messages are rendered
    by the chat template, and an answer is everything it adds to the prompt.
    """

    keys: tuple[str, ...]

    def __init__(self, section: TemplateConfig, tokenizer: Tokenizer) -> None:
        super().__init__(section, tokenizer)
        self._template: ChatTemplate | TrainctlError
        try:
            self._template = _load_template(section, tokenizer)
        except TrainctlError as error:  # plain texts need no template
            if section.chat_template is not None:
                raise
            self._template = error
        found = self._template
        template = "none" if isinstance(found, TrainctlError) else found.fingerprint
        self.fingerprint = f"answers {RECORD_FORMAT} {tokenizer.fingerprint} {template}"
        self.fingerprint += self._begin_identity()

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        encode = self._encode_texts if isinstance(record["prompt"], str) else self._encode_messages
        ids = [each for key in self.keys for each in encode(record, key)]
        _require_tokens(ids, str(record["prompt"]))
        is_answer = [False, True] * len(self.keys)
        return np.concatenate(ids), np.repeat(is_answer, [len(each) for each in ids])

    def _encode_texts(self, record: Mapping[str, Any], key: str) -> tuple[Ids, Ids]:
        answer, end = self._tokenizer.encode(record[key]), self._tokenizer.end_of_document
        if end is not None and answer[-1:].tolist() != [end]:
            answer = np.append(answer, end)
        return self._encode_prompt(record["prompt"]), answer

    def _encode_messages(self, record: Mapping[str, Any], key: str) -> tuple[Ids, Ids]:
        if isinstance(self._template, TrainctlError):
            raise self._template
        tools = record.get("tools")
        prompt = self._template.prompt(record["prompt"], tools)
        whole = self._template.render([*record["prompt"], *record[key]], tools, Learn.all).ids
        if len(whole) <= len(prompt) or not np.array_equal(whole[: len(prompt)], prompt):
            raise CannotRender(
                f"the chat template writes the prompt otherwise where `{key}` follows: which "
                "tokens are the answer's is not known",
                hint="another template in data.chat_template; or data.on_bad_text=skip, which "
                "leaves such records out",
            )
        return prompt, whole[len(prompt) :]


class PreferenceEncoder(_AnswersEncoder):
    """Encoder of pairs, each as the JSON that `data=preferences` makes of it."""

    keys = ANSWERS

    def targets(self, text: str) -> Targets:
        """Return the margin of a pair that has one."""
        record = json.loads(text)
        return [record["margin"]] if "margin" in record else []


class AnswerEncoder(_AnswersEncoder):
    """Encoder of single answers, each as the JSON that `data=answers` makes of it."""

    keys = ("completion",)

    def targets(self, text: str) -> Targets:
        """Return 1 if the answer is good, else 0."""
        return [float(json.loads(text)["label"])]


class PromptEncoder(_AnswersEncoder):
    """Encoder of prompts, each as the JSON that `data=prompts` makes of it."""

    keys = ()

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        prompt = record["prompt"]
        if isinstance(prompt, str):
            ids = self._encode_prompt(prompt)
        elif isinstance(self._template, TrainctlError):
            raise self._template
        else:
            ids = self._template.prompt(prompt, record.get("tools"))
        _require_tokens([ids], str(prompt))
        return ids, np.zeros(len(ids), dtype=bool)

    def record(self, text: str, ids: Ids) -> bytes:
        """Return the line of a prompt that a corpus keeps (`data.prompts`)."""
        record = json.loads(text)
        prompt, columns = record["prompt"], record["columns"]
        if not isinstance(prompt, str):
            columns = {"messages": prompt, **columns}
            prompt = self._tokenizer.decode(ids.tolist(), with_special=True)
        return json.dumps([prompt, columns], separators=(",", ":")).encode() + b"\n"


class StepsEncoder(_RecordEncoder[StepsConfig]):
    """Encoder of answers in steps, each as the JSON that `data=steps` makes of it.

    Prompt, steps and separators are tokenized separately, as by TRL.
    """

    def __init__(self, section: StepsConfig, tokenizer: Tokenizer) -> None:
        super().__init__(section, tokenizer)
        separator = json.dumps(section.step_separator)
        self.fingerprint = f"steps {RECORD_FORMAT} {tokenizer.fingerprint} {separator}"
        self.fingerprint += self._begin_identity()
        self._separator = tokenizer.encode(section.step_separator)

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        encode = self._tokenizer.encode
        ids = [np.concatenate([encode(s), self._separator]) for s in record["completions"]]
        ids.insert(0, self._encode_prompt(record["prompt"]))
        _require_tokens(ids, record["prompt"])
        lengths = [len(each) for each in ids]
        loss_mask = np.zeros(sum(lengths), dtype=bool)
        loss_mask[np.cumsum(lengths)[1:] - 1] = True
        return np.concatenate(ids), loss_mask

    def targets(self, text: str) -> Targets:
        """Return the label of each step."""
        labels: list[float] = json.loads(text)["labels"]
        return labels


class SimilarEncoder(_RecordEncoder[DataFromPaths]):
    """Encoder of similar texts, each record as the JSON that `data=similar` makes of it.

    Each text has the special tokens that the model expects around it.
    """

    def __init__(self, section: DataFromPaths, tokenizer: Tokenizer) -> None:
        super().__init__(section, tokenizer)
        self.fingerprint = f"sequences {RECORD_FORMAT} {tokenizer.fingerprint}"

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        ids = [self._tokenizer.encode_sequence(text) for text in record["texts"]]
        _require_tokens(ids, record["texts"][0])
        lengths = [len(each) for each in ids]
        loss_mask = np.zeros(sum(lengths), dtype=bool)
        loss_mask[np.cumsum(lengths[:-1])] = True
        return np.concatenate(ids), loss_mask


class TextEncoder(SimilarEncoder):
    """Encoder of labelled texts, each as the JSON that `data=labelled` makes of it.

    Two texts are one sequence, as the tokenizer joins them.
    """

    def _encode(self, record: Mapping[str, Any]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        ids = self._tokenizer.encode_sequence(*record["texts"])
        _require_tokens([ids], record["texts"][0])
        return ids, np.zeros(len(ids), dtype=bool)

    def targets(self, text: str) -> Targets:
        """Return the label: names or numbers."""
        label: Targets = json.loads(text)["label"]
        return label


def gives_messages(section: DataConfig) -> bool:
    """Return True if a source has conversations, or records whose prompts are lists of messages.

    The first record of its files decides; without files it has none.
    """
    if isinstance(section, ChatConfig) or section.factory is not None:
        return section.factory is None
    if not isinstance(section, TemplateConfig):
        return False
    if isinstance(section, PromptsConfig) and section.as_message:
        return True
    try:
        first = next(Reader(section).documents(split_files(section).train), None)
    except TrainctlError:
        return False
    return first is not None and isinstance(json.loads(first.text)["prompt"], list)


def _load_template(
    section: TemplateConfig, tokenizer: Tokenizer, marked: str | None = None
) -> ChatTemplate:
    named, arguments = section.chat_template, section.template_arguments
    return ChatTemplate.of(tokenizer.file, named, arguments, marked)


def _require_tokens(ids: Sequence[Ids], text: str) -> None:
    if not all(map(len, ids)):
        raise CannotRender(
            f"the tokenizer has no token for a text of the record that begins {text!r:.60}",
            hint="correct the record, or data.on_bad_text=skip, which leaves such out",
        )
