"""Exports: what one says of itself, files that appear when they are complete, and models of exports
in this process, the trainer's side of `trainctl.load`.

The export of a user's module has weights in safetensors beside the reference of its function.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from trainctl.config.quantities import disk_text
from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig
from trainctl.data.tokenizer import load_tokenizer
from trainctl.data.user_functions import make_importable
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.options.tokenizer import spec_of
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import read_record
from trainctl.runs.files import sync_directory, write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import is_alive
from trainctl.train.models.encoders import auto_class
from trainctl.train.models.model import factory_model, materialise, skeleton
from trainctl.train.models.weights import SafetensorsWeights


@dataclass(frozen=True, slots=True)
class ExportedCheckpoint:
    """Result of an export."""

    files: list[str]
    """Names of the files in the folder, sorted."""
    size_bytes: int
    """Size of the weights."""
    num_parameters: int
    """Number of parameters; tied ones count once."""
    notes: list[str]
    """Remarks to show the user."""


@contextmanager
def new_folder(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `out` on success and removed on failure.

    Raises:
        TrainctlError: `out` exists and is not empty, or it cannot be written (exit code 4).
    """
    with _renamed(out, needed_bytes) as folder:
        folder.mkdir()
        yield folder
        sync_directory(folder)


@contextmanager
def new_file(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary path, at which the caller makes a file that becomes `out` on success.

    Raises:
        TrainctlError: `out` exists, or cannot be written (exit code 4).
    """
    with _renamed(out, needed_bytes) as path:
        if out.exists():  # a rename would replace it
            raise FileExistsError(errno.EEXIST, "")
        yield path
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _renamed(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary path beside `out`; what is there is renamed to `out`, or removed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        free_bytes = shutil.disk_usage(out.parent).free
        if free_bytes < needed_bytes:
            sizes = f"{disk_text(needed_bytes)} are needed and {disk_text(free_bytes)} free"
            raise OSError(errno.ENOSPC, sizes)
        made = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            yield made
            made.rename(out)  # an empty folder is replaced by a folder, any other refused
        except BaseException:
            _remove(made)
            raise
        sync_directory(out.parent)
    except FileNotFoundError:  # the checkpoint was rotated away
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise TrainctlError(f"{out} exists and is not an empty folder") from None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise MachineError(
            f"cannot export to {out}: {error.strerror}",
            hint="free space, or name a folder on another disk" if full else "",
        ) from None


def _remove_leftovers(out: Path) -> None:
    """Remove the temporary folders of killed exports to the same folder."""
    for path in out.parent.iterdir():
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.tmp", path.name)
        if match is not None and not is_alive(int(match[1])):
            _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FILE = "module.json"
"""File in place of `config.json`, with the function's reference and its arguments."""

NOT_LOADED = (
    f"{FILE} names the function and its arguments: trainctl.load reads it, transformers does not"
)


def write_module_file(model: ModelConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write the reference of the function that makes the module, its arguments and the type."""
    write_json(
        folder / FILE,
        {
            "factory": model.factory,
            "arguments": getattr(model, "arguments", {}),
            "dtype": str(dtype).removeprefix("torch."),
        },
    )


def load_run_export(run: RunPaths, folder: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model in an export of the run's weights, on the CPU, and the run's tokenizer.

    Args:
        folder: The export; it may be removed afterwards.
        dtype: Number format of its weights.
    """
    config = config_of(run)
    trusts_code = config.model.trust_remote_code
    kind: Any = None
    if config.model.factory is not None:
        make_importable(Path(str(read_record(run)["folder"])))  # as on the ranks
        if not (folder / FILE).is_file():
            kind = type(factory_model(config.model, TYPES[dtype]))
    model = _load_model(folder, TYPES[dtype], kind, trusts_code=trusts_code)
    if spec_of(config.tokenizer).published is None:
        return model, load_tokenizer(config.tokenizer)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code)


def load_export(folder: Path, dtype: str | None) -> tuple[Any, Any]:
    """Return the model of an exported directory, on the CPU, and its tokenizer: None if the
    directory has none.

    Args:
        dtype: Number format of the weights; None is the export's own.
    """
    model = _load_model(folder, None if dtype is None else TYPES[dtype])
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return model, AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def _load_model(
    folder: Path, dtype: torch.dtype | None, kind: Any = None, *, trusts_code: bool = False
) -> Any:
    """Return the model of an export in evaluation mode, read by a class of transformers if the
    directory has a config.json: by `kind`, else by the auto class of its architecture.
    """
    if (folder / FILE).is_file():
        view: Any = load_module(folder, dtype=dtype)
        return view.module.eval()
    settings = {"trust_remote_code": True} if trusts_code else {}
    if kind is None:
        config = AutoConfig.from_pretrained(folder, **settings)
        named = config.architectures or [""]
        kind = auto_class(config, has_score=named[0].endswith("ForSequenceClassification"))
    with _quiet():
        return kind.from_pretrained(folder, dtype=dtype or "auto", **settings)


def load_module(folder: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the module of an export on the CPU, seen as a model of transformers.

    The function is imported as any module of this process is, and runs here: load exports that you
    trust.

    Args:
        dtype: Type of the weights; None is the export's own.

    Raises:
        TrainctlError: The folder is no such export (exit code 5), the function cannot be imported,
            or it makes another module.
    """
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        factory, arguments = str(found["factory"]), dict(found["arguments"])
        kept = getattr(torch, str(found["dtype"]))
        if not isinstance(kept, torch.dtype):
            raise ValueError(f"{found['dtype']} is no type of weights")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise RunStateError(f"{folder} is no export of a module: {FILE}: {error}") from None
    model = new_section("model", "module", factory=factory, arguments=arguments)
    view = skeleton(model, kept if dtype is None else dtype)
    materialise(view, SafetensorsWeights(folder, view), torch.device("cpu"))
    return view.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bar off the terminal or the notebook."""
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
