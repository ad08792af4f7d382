"""The chat template of a tokenizer: where its files have it, and what it calls special tokens.

The first of these that there is: `chat_template.jinja`, `chat_template` of `tokenizer_config.json`
(of several the one that is called `default`), beside the tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainctl.config.special_tokens import beside
from trainctl.errors import TrainctlError

_FILE, _CONFIG, _MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def template_of(tokenizer: Path | None, named: str | None = None) -> str:
    """A chat template, in Jinja.

    Args:
        tokenizer: A file of the tokenizers library; None for a tokenizer that has none.
        named: The file of another template; None is the tokenizer's own.

    Raises:
        TrainctlError: There is none, or it cannot be read.
    """
    if tokenizer is None:
        raise TrainctlError(
            "the tokenizer has no file, and no chat template belongs to it",
            hint="tokenizer=hf, with the directory of a model that was made for chat",
        )
    if named is not None:
        return _read(Path(named).expanduser())
    if tokenizer.with_name(_FILE).is_file():
        return _read(tokenizer.with_name(_FILE))
    said = beside(tokenizer, _CONFIG).get("chat_template")
    if isinstance(said, list):  # several, with names
        objects = (each for each in said if isinstance(each, dict))
        by_name = {each.get("name"): each.get("template") for each in objects}
        said = by_name.get("default")
    if not isinstance(said, str) or not said.strip():
        raise TrainctlError(
            f"{tokenizer.parent} has no chat template, neither in {_FILE} nor in {_CONFIG}",
            hint="data.chat_template=FILE.jinja, with the one that the model is to be used with; "
            "a base model has none",
        )
    return said


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
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TrainctlError(
            f"cannot read the chat template {file}: {error.strerror}",
            hint="data.chat_template is a file of Jinja",
        ) from None
    except UnicodeDecodeError:
        raise TrainctlError(f"the chat template {file} is not UTF-8") from None
