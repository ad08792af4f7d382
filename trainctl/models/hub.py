"""Models by their names on the Hugging Face hub, downloaded before planning.

A directory of the hub's cache identifies its model (`models--ORG--NAME/snapshots/COMMIT`). A plan
therefore needs the small files only, and each machine that starts from the model fetches the
weights of that commit itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trainctl.errors import ExitCode, TrainctlError
from trainctl.models.safetensors_files import INDEX, has_weights, weight_map

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Configuration, tokenizer, weight index, and code (which runs only with
model.trust_remote_code).
"""
WEIGHTS = ("*.safetensors",)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})$")


def is_hub_name(text: str) -> bool:
    """Whether a text can be a name on the hub, `ORG/NAME`, and is no existing path."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def local_folder(name: str, key: str = "model.path") -> str:
    """Return the folder of a model's small files, downloaded if they are not in the hub's cache.

    Args:
        key: Configuration key that holds the name, for messages.

    Raises:
        TrainctlError: The files are not here and cannot be fetched.
    """
    return _download(name, None, SMALL, key)


def fetch_weights(folder: str, key: str = "model.initial_weights") -> None:
    """Download the weights that a folder of the hub's cache lacks.

    Does nothing for any other folder.

    Raises:
        TrainctlError: They cannot be fetched.
    """
    found = _SNAPSHOT.search(str(Path(folder).expanduser().absolute()))
    if found is None or _is_whole(Path(folder)):
        return
    owner, name, commit = found.groups()
    print(f"downloading the weights of {owner}/{name} from the hub", file=sys.stderr, flush=True)
    _download(f"{owner}/{name}", commit, (*SMALL, *WEIGHTS), key)


def is_hub_folder(folder: str) -> bool:
    """Whether a folder is in the hub's cache."""
    return _SNAPSHOT.search(str(Path(folder).expanduser().absolute())) is not None


def _is_whole(folder: Path) -> bool:
    if (folder / INDEX).is_file():
        return all((folder / file).is_file() for file in weight_map(folder).values())
    return has_weights(folder)


def _download(name: str, commit: str | None, patterns: tuple[str, ...], key: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _not_here(name, "huggingface_hub is not installed", key) from None
    try:
        return str(snapshot_download(name, revision=commit, allow_patterns=list(patterns)))
    except Exception as error:  # from the library, its HTTP client or the network
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise _not_here(name, words[0][:160], key) from None


def _not_here(name: str, why: str, key: str) -> TrainctlError:
    return TrainctlError(
        f"{name} is no directory here, and cannot be fetched from the Hugging Face hub ({why})",
        hint=f"where there is a network: `hf download {name} --local-dir DIR` (`hf auth login` "
        f"first for models that ask for consent), then {key}=DIR",
        exit_code=ExitCode.bad_input,
    )
