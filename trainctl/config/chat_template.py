"""Chat template and special tokens of a tokenizer, read from its files.

Lookup order: `chat_template.jinja` next to the tokenizer, then `chat_template` in
`tokenizer_config.json` (the one named `default` if there are several). A template can also be
chosen by name, from that list or from the files in `additional_chat_templates`, where current
transformers writes them.
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
    """Return the named templates of a tokenizer that has several."""
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
    """Return the special tokens that templates receive, such as `bos_token`, by name.

    They are read from the files next to the tokenizer's file `tokenizer`.

    Raises:
        TrainctlError: One of these files cannot be read.
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
