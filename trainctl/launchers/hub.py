"""Uploads of exported folders to the Hugging Face hub, each in one commit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.errors import MachineError, TrainctlError
from trainctl.runs.provenance import redact_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = "hub:"
REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
REPLACED = re.compile(r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of an earlier export, which a new one without them removes."""


def check_repository(to: str, *, public: bool) -> str:
    """Return the repository that `hub:USER/NAME` names, before any work.

    Raises:
        TrainctlError: It is no such name; there is no valid token, or the hub cannot be reached
            (exit code 4); or the repository is public and the model was not said to be.
    """
    from huggingface_hub import HfApi, get_token

    name = to.removeprefix(PREFIX)
    if REPOSITORY.fullmatch(name) is None:
        raise TrainctlError(f"--to {to} names no repository", hint="--to hub:USER/NAME")
    if get_token() is None:
        raise MachineError(
            "an upload needs a token of the hub, and there is none",
            hint="export HF_TOKEN=..., a token that may write to the repository",
        )
    with _hub_errors(f"{name} cannot be looked up"):
        hub = HfApi()
        hub.whoami()  # raises if the token is not valid
        is_public = hub.repo_exists(name) and not hub.model_info(name).private
    if is_public and not public:
        raise TrainctlError(
            f"{name} is a public repository: everyone could read the model",
            hint="--public, or name another repository",
        )
    return name


def upload(folder: Path, name: str, *, public: bool, message: str) -> dict[str, Any]:
    """Upload all files of a folder in one commit, and compare what the hub then has.

    The repository is made if there is none; it is private unless `public`. Weights of an earlier
    export that this one does not replace are removed by the same commit.

    Returns:
        `repository`, `url`, `commit` and `private`.

    Raises:
        TrainctlError: The hub cannot be reached or refuses (exit code 4). Nothing is committed
            then; files that were sent are not in the repository.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub = HfApi()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with _hub_errors(f"the upload to {name} failed, and nothing was committed"):
        url = hub.create_repo(name, private=not public, exist_ok=True)
        names = {path.name for path in files}
        stale = [
            each
            for each in hub.list_repo_files(name)
            if REPLACED.fullmatch(each) and each not in names
        ]
        done = hub.create_commit(
            name,
            # One commit: `upload_folder` may make several, the first of which has half a model.
            [CommitOperationAdd(path.name, str(path)) for path in files]
            + [CommitOperationDelete(each) for each in stale],
            commit_message=message,
        )
    _compare(hub, name, done.oid, files)
    return {"repository": name, "url": str(url), "commit": done.oid, "private": not public}


def _compare(hub: HfApi, name: str, commit: str, files: list[Path]) -> None:
    """Compare the digests of the files with those that the hub has.

    Raises:
        TrainctlError: A file differs (exit code 4).
    """
    with _hub_errors(f"{commit} of {name} was committed, but cannot be compared"):
        found = hub.model_info(name, revision=commit, files_metadata=True).siblings or []
    theirs = {each.rfilename: each for each in found}
    for path in files:
        each = theirs.get(path.name)
        if each is not None and each.lfs is not None:
            with path.open("rb") as stream:
                same = each.lfs.sha256 == hashlib.file_digest(stream, "sha256").hexdigest()
        else:
            content = path.read_bytes()
            header = f"blob {len(content)}\0".encode()
            same = each is not None and each.blob_id == hashlib.sha1(header + content).hexdigest()
        if not same:
            raise MachineError(
                f"{commit} of {name} has another {path.name} than was sent",
                hint="the same command again",
            )


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn errors of the library and of the network into an error with exit code 4."""
    try:
        yield
    except Exception as error:  # from the library, its HTTP client or the network
        cause = error.__cause__ or error
        words = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise MachineError(
            f"{what}: {redact_text(words[:200])}",
            hint="once the hub can be reached and HF_TOKEN may write there: the same command again",
        ) from None
