"""The chat template of a tokenizer: where its files have it, and what it calls special tokens.

The first of these that there is: `chat_template.jinja`, `chat_template` of `tokenizer_config.json`
(of several the one that is called `default`), beside the tokenizer. Of several, another is named:
of those, or of the files in `additional_chat_templates`, where transformers writes them today.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainctl.config.special_tokens import beside
from trainctl.errors import TrainctlError

_FILE, _CONFIG, _MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_FOLDER = "additional_chat_templates"
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def template_of(tokenizer: Path | None, named: str | None = None) -> str:
    """Return a chat template, in Jinja.

    Args:
        tokenizer: A file of the tokenizers library; None for a tokenizer that has none.
        named: The file of another template, or the name of one of several that the tokenizer has;
            None is the tokenizer's own.

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
        return by_name[named] if named in by_name else _read(Path(named).expanduser())
    if tokenizer.with_name(_FILE).is_file():
        return _read(tokenizer.with_name(_FILE))
    said = beside(tokenizer, _CONFIG).get("chat_template")
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
    """Return the templates of a tokenizer that has several."""
    said = beside(tokenizer, _CONFIG).get("chat_template")
    objects = [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []
    found = {
        each["name"]: each["template"]
        for each in objects
        if isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
    }
    files = sorted((tokenizer.parent / _FOLDER).glob("*.jinja"))
    return found | {file.stem: _read(file) for file in files}


def special_tokens_of(tokenizer: Path) -> dict[str, str]:
    """What templates are given, by name: `bos_token`, `eos_token` and so on, as the files say.

    Args:
        tokenizer: A file of the tokenizers library.

    Raises:
        TrainctlError: One of the files beside it cannot be read.
    """
    found = {}
    for said in (beside(tokenizer, _MAP), beside(tokenizer, _CONFIG)):
        for key in (f"{name}_token" for name in _NAMES):
            token: Any = said.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    return found


def _read(file: Path) -> str:
    if file.exists() and not file.is_file():  # a pipe would be waited for
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
