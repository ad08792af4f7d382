"""Exports of a run's checkpoint, each made in a process of its own, which loads torch.

An upload to the Hugging Face hub is one commit of an exported folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.config.extras import install_command
from trainctl.config.store import load_config
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import MachineError, TrainctlError
from trainctl.launchers.offline import WeightsChoice, require_new, run_task
from trainctl.monitor.card import write_card
from trainctl.options.adapter import low_rank
from trainctl.runs.files import temporary_folder
from trainctl.runs.provenance import redact_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi


HUB = "hub:"
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

    name = to.removeprefix(HUB)
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
    _compare_with_hub(hub, name, done.oid, files)
    return {"repository": name, "url": str(url), "commit": done.oid, "private": not public}


def _compare_with_hub(hub: HfApi, name: str, commit: str, files: list[Path]) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """Format that a checkpoint can be exported to."""

    function: str
    """`module:function`, called with the configuration, the checkpoint and the output's path, and
    by keyword with `progress(done, total)` and the options in `takes`; it returns an
    `ExportedCheckpoint`. The output appears only when it is complete.
    """
    check: str = ""
    """`module:function` of `--check`, called as `function` is, but without `progress` and
    `shard_bytes`; it returns a `CheckedExport`. Empty if there is none.
    """
    takes: frozenset[str] = frozenset()
    """Options that the functions take: `dtype` (a torch type, or a name of `types` that torch does
    not have), `weights` (name of a state), `shard_bytes`.
    """
    types: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Number formats that `dtype` can be."""
    packages: tuple[str, ...] = ()
    """Modules that the format needs."""
    check_packages: tuple[str, ...] = ()
    """Modules that `check` needs."""
    is_file: bool = False
    """Whether the output is a file, and not a folder."""
    has_card: bool = False
    """Whether a model card can stand in the folder."""


MODEL = frozenset({"dtype", "weights"})

TARGETS = {
    "transformers": ExportTarget(
        function="trainctl.train.export.directory:export",
        check="trainctl.train.export.check:check_directory",
        takes=MODEL | {"shard_bytes"},
        has_card=True,
    ),
    "gguf": ExportTarget(
        function="trainctl.train.export.gguf_file:export_gguf",
        check="trainctl.train.export.check:check_gguf",
        takes=MODEL,
        types=("fp32", "bf16", "fp16", "q8_0"),
        packages=("gguf",),
        check_packages=("xllamacpp",),
        is_file=True,
    ),
    "trainer": ExportTarget(
        function="trainctl.migration.checkpoints.trainer:export_trainer",
        check="trainctl.migration.checkpoints.to_torch:check_trainer",
    ),
    "dcp": ExportTarget(
        function="trainctl.migration.checkpoints.to_torch:export_dcp",
        check="trainctl.migration.checkpoints.to_torch:check_dcp",
    ),
    "deepspeed-universal": ExportTarget(
        function="trainctl.migration.checkpoints.to_universal:export",
        check="trainctl.migration.checkpoints.to_torch:check_universal",
    ),
}
"""Formats by the name that `--to` takes."""

ADAPTER = ExportTarget(
    function="trainctl.train.export.adapter:export_adapter",
    check="trainctl.train.export.check:check_adapter",
    takes=MODEL,
    check_packages=("peft",),
    has_card=True,
)
"""PEFT's directory, which `--adapter` chooses."""


def export(
    choice: WeightsChoice,
    out: Path | None,
    *,
    to: str = "transformers",
    public: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Write a checkpoint in another format, or upload it to the hub.

    Args:
        out: A new or empty folder; a new file if the format is one. None, for an upload alone,
            uploads from a temporary folder.
        to: Name in `TARGETS`; or `hub:USER/NAME`, which is a directory for transformers or PEFT
            with its card.
        public: Whether a repository that an upload makes is public.
        options: As of `export_files`.

    Returns:
        Fields of the export; `hub` has those of `upload`, unless the check found a difference.

    Raises:
        TrainctlError: As of `export_files`; the hub refuses or cannot be reached (exit code 4).
    """
    if not to.startswith(HUB):
        if out is None or public:
            what = "names no OUT" if out is None else "is no upload, so that --public means nothing"
            raise TrainctlError(f"--to {to} {what}")
        return export_files(choice, out, to=to, **options)
    name = check_repository(to, public=public)
    with temporary_folder() as temporary:
        folder = temporary / "model" if out is None else out
        made = export_files(choice, folder, **{**options, "card": True})
        if not made.get("check", {"equal": True})["equal"]:
            return made
        choice.progress("uploading", 0, 1)
        message = f"{made['checkpoint']} of {choice.run.root.name}"
        return {**made, "hub": upload(folder, name, public=public, message=message)}


def export_files(
    choice: WeightsChoice,
    out: Path,
    *,
    to: str = "transformers",
    dtype: str | None = None,
    adapter: bool | None = None,
    shard_bytes: int | None = None,
    check: bool = False,
    card: bool = False,
) -> dict[str, Any]:
    """Write a checkpoint in another format.

    Args:
        out: A new or empty folder; a new file if the format is one.
        to: Name in `TARGETS`.
        dtype: Number format of the weights; None takes the one that the run trains in.
        adapter: True writes the adapter alone, False requires one to merge; None merges any.
        shard_bytes: Largest file of weights.
        check: Load the export by the library that it is for, and compare it with the checkpoint.
        card: Also write a model card.

    Returns:
        Fields of the export; `check` has those of a `CheckedExport`.

    Raises:
        TrainctlError: The output exists, the run has no adapter, the format is unknown or does not
            have one of the options, or a package is missing (exit code 4).
    """
    run = choice.run
    if adapter is not None and low_rank(load_config(run.config).adapter) is None:
        raise TrainctlError(
            f"{run.root} has no adapter: its checkpoints hold the model's own weights",
            hint="leave the option out",
        )
    target = _target_of(to, adapter)
    given = {"dtype": dtype, "weights": choice.weights, "shard_bytes": shard_bytes}
    wanted = {**given, "check": check or None, "card": card or None}
    _check_options(target, to, wanted | ({"weights": None} if choice.weights == "raw" else {}))
    _require_packages(target.packages + (target.check_packages if check else ()))
    require_new(out, is_file=target.is_file)
    taken = {name: value for name, value in given.items() if name in target.takes}
    checked = target.check if check else ""
    options = {"out": out, "function": target.function, "options": taken, "check": checked}
    made = run_task("export", choice, options)
    if card:
        checkpoint = choice.run.checkpoints / made["checkpoint"]
        write_card(choice.run, checkpoint, out, adapter=bool(adapter))
        made["files"] = sorted(path.name for path in out.iterdir())
    return made


def _check_options(target: ExportTarget, to: str, wanted: Mapping[str, Any]) -> None:
    """Refuse options that a format does not have; None is an option that was not given.

    Raises:
        TrainctlError: The format does not have one, or not this number format.
    """
    has = {*target.takes, *(["check"] if target.check else []), *(["card"] * target.has_card)}
    for name, value in wanted.items():
        if value is not None and name not in has:
            option = name.replace("_bytes", "_size").replace("_", "-")
            raise TrainctlError(f"--{option} is not an option of --to {to}", hint="leave it out")
    if wanted["dtype"] not in (None, *target.types):
        raise TrainctlError(f"dtype={wanted['dtype']!r} is none of {', '.join(target.types)}")


def _require_packages(modules: Sequence[str]) -> None:
    """Refuse to begin without packages, before any work.

    Raises:
        TrainctlError: One is not installed (exit code 4).
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MachineError(
            f"this export needs a package that is missing ({', '.join(missing)})",
            hint=install_command(*missing),
        )


def _target_of(to: str, adapter: bool | None) -> ExportTarget:
    """Return the target that the options choose.

    Raises:
        TrainctlError: There is no such target, or it has no adapters.
    """
    if to not in TARGETS:
        raise TrainctlError(
            f"--to {to} is none of {', '.join(TARGETS)}, hub:USER/NAME",
            hint=did_you_mean(nearest_names(to, TARGETS)),
        )
    if not adapter:
        return TARGETS[to]
    if to != "transformers":
        raise TrainctlError(
            f"--adapter is not an option of --to {to}", hint="leave it out: the adapter is merged"
        )
    return ADAPTER
