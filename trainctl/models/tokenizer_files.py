"""Facts in the JSON files of a tokenizer: vocabulary size, special tokens, chat template.

The end-of-document token is the first of these that exists:

1. `eos_token` of `tokenizer_config.json`, then of `special_tokens_map.json`, next to the tokenizer;
2. `eos_token_id` of `generation_config.json`, then of `config.json`, next to it (the first of
   several);
3. a token of the vocabulary with one of the names in `END_NAMES`.

The chat template is `chat_template.jinja` next to the tokenizer, or `chat_template` of
`tokenizer_config.json` (the one named `default` if there are several). One can also be chosen by
name, from that list or from the files in `additional_chat_templates`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.errors import TrainctlError
from trainctl.models.local_path import local_path

END_NAMES = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<|im_end|>",
    "[SEP]",
)
"""Names that published tokenizers give to their end-of-document token, most specific first."""

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
"""Names that published tokenizers give to the token that hides another one."""


LARGEST_GAP = 1_000_000
"""Maximum number of unused ids: tables have a row for each id, and published files leave a few
thousand unused.
"""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about a tokenizer, known without its library."""

    vocab_size: int
    """Largest id + 1; there may be unused ids below."""
    end_of_document: int | None = None
    """Id appended to each document; None if there is none."""
    end_token: str = ""
    found_in: str = ""
    """Origin of the end-of-document token; empty without one."""
    mask_token: int | None = None
    """Id that hides another token from an encoder; None if there is none."""
    begin_of_text: tuple[int, ...] = ()
    """Ids that the post-processor puts before a text, as transformers and llama.cpp do."""
    begin_tokens: tuple[str, ...] = ()

    def describe(self, rows: int) -> str:
        """Describe the ids and the document end, for a model whose embedding has `rows` rows."""
        ids = f"{self.vocab_size:,} of {rows:,} ids"
        if self.end_of_document is None:
            return f"{ids}, nothing ends a document"
        end = self.end_of_document
        token = f"{self.end_token} ({end})" if self.end_token else f"id {end}"
        where = f", by {self.found_in}" if self.found_in else ""
        return f"{ids}, {token} ends a document{where}"


def read_facts(path: Path) -> TokenizerFacts:
    """Read the facts from a `tokenizers` file and the files next to it.

    Raises:
        TrainctlError: One of the files is missing or malformed; names the file.
    """
    content = _read_object(path)
    vocabulary = _read_vocabulary(path, content)
    size = max(vocabulary.values(), default=-1) + 1
    if size == 0:
        raise _malformed_error(path, "has no tokens")
    if size > len(vocabulary) + LARGEST_GAP:
        token = max(vocabulary, key=lambda each: vocabulary[each])
        raise _malformed_error(
            path, f"gives {token!r:.40} the id {size - 1:,}, and has {len(vocabulary):,} tokens"
        )
    named = (special_tokens_of(path).get("mask_token"), *MASK_NAMES)
    mask = next((vocabulary[token] for token in named if token in vocabulary), None)
    try:
        begin = _begin_of_text(content.get("post_processor"))
        if not all(isinstance(text, str) and isinstance(number, int) for text, number in begin):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise _malformed_error(path, "has a post_processor that cannot be read") from None
    ids, tokens = tuple(number for _, number in begin), tuple(token for token, _ in begin)
    for token, number, found_in in _end_candidates(path, vocabulary):
        return TokenizerFacts(size, number, token, found_in, mask, ids, tokens)
    return TokenizerFacts(size, mask_token=mask, begin_of_text=ids, begin_tokens=tokens)


def _begin_of_text(processor: Any) -> list[tuple[str, int]]:
    """Return the tokens that a post-processor puts before a single text, with their ids."""
    if not isinstance(processor, dict):
        return []
    if processor.get("type") == "Sequence":
        parts = [_begin_of_text(each) for each in reversed(processor["processors"])]
        return next(filter(None, parts), [])
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        token, number = processor["cls"]
        return [(token, number)]
    found: list[tuple[str, int]] = []
    for piece in processor.get("single") or ():
        if "SpecialToken" not in piece:
            break
        special = processor["special_tokens"][piece["SpecialToken"]["id"]]
        found += zip(special["tokens"], special["ids"], strict=True)
    return found


def _read_vocabulary(path: Path, content: Mapping[str, Any]) -> dict[str, int]:
    """Return ids by token; added tokens take precedence."""
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(listed, dict):
        found = dict(listed)
    elif isinstance(listed, list):  # unigram: tokens with their scores
        found = {
            str(item[0]): number
            for number, item in enumerate(listed)
            if isinstance(item, list) and item
        }
    else:
        raise _malformed_error(path, "is no tokenizers file: model.vocab is missing")
    added = content.get("added_tokens") or []
    for item in added if isinstance(added, list) else []:
        if not isinstance(item, dict) or "content" not in item or "id" not in item:
            raise _malformed_error(path, f"has a broken entry in added_tokens: {item!r:.80}")
        found[str(item["content"])] = item["id"]
    for token, number in found.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise _malformed_error(path, f"gives {token!r:.40} the id {number!r:.40}")
    return found


def _end_candidates(path: Path, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    """Yield token, id and origin of each candidate for the document end, in order of precedence."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_neighbour_file(path, name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if not isinstance(token, str) or token not in vocabulary:
            raise _malformed_error(
                path.with_name(name), f"has eos_token {token!r:.60}, which {path.name} lacks"
            )
        yield token, vocabulary[token], f"eos_token of {name}"
    names = {number: token for token, number in vocabulary.items()}
    for name in ("generation_config.json", "config.json"):
        number = next(iter(_end_ids(path, name)), None)
        if number in names:
            yield names[number], number, f"eos_token_id of {name}"
    for token in END_NAMES:
        if token in vocabulary:
            yield token, vocabulary[token], "its name"


def end_ids(path: Path) -> list[int]:
    """Return all ids that end generation, by `generation_config.json` next to a tokenizer.

    Raises:
        TrainctlError: It cannot be read.
    """
    return _end_ids(path, "generation_config.json")


def _end_ids(path: Path, name: str) -> list[int]:
    said = read_neighbour_file(path, name).get("eos_token_id")
    return [each for each in (said if isinstance(said, list) else [said]) if isinstance(each, int)]


def read_neighbour_file(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file next to the tokenizer's; empty if there is no such file.

    Raises:
        TrainctlError: It cannot be read.
    """
    other = path.with_name(name)
    return _read_object(other) if other.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise _malformed_error(path, "is no regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainctlError(
            f"cannot read {path}: {error.strerror}",
            hint="give a tokenizers JSON file, or a transformers directory with tokenizer.json",
        ) from None
    except UnicodeDecodeError as error:
        raise _malformed_error(path, f"is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _malformed_error(
            path, f"is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _malformed_error(path, f"is no JSON that can be read ({error!s:.80})") from None
    if not isinstance(content, dict):
        raise _malformed_error(path, "holds no JSON object")
    return content


def _malformed_error(path: Path, why: str) -> TrainctlError:
    return TrainctlError(f"{path} {why}", hint="save the tokenizer again, or copy it anew")


_FILE, _CONFIG, _MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_FOLDER = "additional_chat_templates"
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_chat_template(tokenizer: Path | None, named: str | None = None) -> str:
    """Return a chat template, in Jinja.

    Args:
        tokenizer: File of the tokenizers library; None for a tokenizer without a file.
        named: A template's file, or the name of one of the tokenizer's; None for the default.

    Raises:
        TrainctlError: There is none, or it cannot be read.
    """
    if tokenizer is None:
        raise TrainctlError(
            "the tokenizer has no file, and no chat template belongs to it",
            hint="tokenizer=hf, with the directory of a model that was made for chat",
        )
    if named is not None:
        by_name = _by_name(tokenizer)
        return by_name[named] if named in by_name else read_template_file(local_path(named))
    if tokenizer.with_name(_FILE).is_file():
        return read_template_file(tokenizer.with_name(_FILE))
    said = read_neighbour_file(tokenizer, _CONFIG).get("chat_template")
    if isinstance(said, list):
        by_name = _by_name(tokenizer)
        if by_name and "default" not in by_name:
            raise TrainctlError(
                f"{tokenizer.parent} has several chat templates, and none is the default: "
                f"{', '.join(by_name)}",
                hint=f"data.chat_template={next(iter(by_name))}",
            )
        said = by_name.get("default")
    if not isinstance(said, str) or not said.strip():
        raise TrainctlError(
            f"{tokenizer.parent} has no chat template, neither in {_FILE} nor in {_CONFIG}",
            hint="data.chat_template=FILE.jinja, with the one that the model is to be used with; "
            "a base model has none",
        )
    return said


def _by_name(tokenizer: Path) -> dict[str, str]:
    """Return the named templates of a tokenizer that has several."""
    said = read_neighbour_file(tokenizer, _CONFIG).get("chat_template")
    objects = [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []
    found = {
        each["name"]: each["template"]
        for each in objects
        if isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
    }
    files = sorted((tokenizer.parent / _FOLDER).glob("*.jinja"))
    return found | {file.stem: read_template_file(file) for file in files}


def special_tokens_of(tokenizer: Path) -> dict[str, str]:
    """Return the special tokens that templates receive, such as `bos_token`, by name.

    They are read from the files next to the tokenizer's file `tokenizer`.

    Raises:
        TrainctlError: One of these files cannot be read.
    """
    found = {}
    for said in (read_neighbour_file(tokenizer, _MAP), read_neighbour_file(tokenizer, _CONFIG)):
        for key in (f"{name}_token" for name in _NAMES):
            token: Any = said.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    return found


_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def has_marks(template: str) -> bool:
    """Return True if a template marks what the assistant says, with `{% generation %}`."""
    return bool(_MARK.search(template))


def read_marked_template(name: str) -> str:
    """Return the template in the file that `data.learn` names.

    Raises:
        TrainctlError: There is no such file, or it has no marks.
    """
    file, choices = local_path(name), "assistant, last, all"
    if not file.is_file():
        raise TrainctlError(
            f"data.learn={name} is none of {choices}, and no file of Jinja",
            hint=f"one of {choices}; or the chat template with {{% generation %}} in it, as a file",
        )
    template = read_template_file(file)
    if not has_marks(template):
        raise TrainctlError(
            f"data.learn={name} has no {{% generation %}}: it marks nothing",
            hint="{% generation %} before what the assistant says, {% endgeneration %} after it",
        )
    return template


def read_template_file(file: Path) -> str:
    """Return the text of a template's file.

    Raises:
        TrainctlError: It cannot be read.
    """
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise TrainctlError(f"the chat template {file} is no regular file")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TrainctlError(
            f"cannot read the chat template {file}: {error.strerror}",
            hint="data.chat_template is a file of Jinja, or the name of one of the tokenizer's own",
        ) from None
    except UnicodeDecodeError:
        raise TrainctlError(f"the chat template {file} is not UTF-8") from None
