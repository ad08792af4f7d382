"""A model traced in a process of its own, so that a command that plans imports no torch.

What the trace of a configuration found (`trainctl.train.trace`) is kept in the user's cache folder
under a digest of all that it depends on: the model's configuration and code, the length of the
sequences, the number formats, and the packages' versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.registry import load
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding, TrainctlError

SECONDS = 600
"""Far more than the trace of any model takes; code of a directory's own may do anything."""

NOT_TRACED = "TC147"

FORMAT = 1
"""Of what is kept; another one is not read."""

PACKAGES = ("torch", "transformers", "trainctl")

_known: dict[str, dict[str, Any]] = {}


def needs_trace(config: RunConfig) -> bool:
    """Whether a model has no closed form: what its directory says is not all that it is."""
    model = config.model
    return model.is_directory and bool(model.path)


def trace_in_child(config: RunConfig, folder: Path | None = None) -> dict[str, Any]:
    """What a trace of the model finds, as JSON (`trainctl.memory.traced.TracedModel`).

    Args:
        config: The configuration.
        folder: Where the user's own code is looked for; None is the current folder.

    Raises:
        TrainctlError: The model cannot be built or traced: says why, and which file it is.
    """
    folder = folder or Path.cwd()
    key = _key(config, folder)
    found = known_trace(config, folder)
    if found is None:
        found = _trace(config, folder)
        _known[key] = found
        _keep(key, found)
    return found


def known_trace(config: RunConfig, folder: Path | None = None) -> dict[str, Any] | None:
    """What an earlier trace found, of this process or an earlier one; starts none."""
    key = _key(config, folder or Path.cwd())
    if key not in _known:
        try:
            content = json.loads(_file(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
        _known[key] = content["traced"]
    return _known[key]


def _trace(config: RunConfig, folder: Path) -> dict[str, Any]:
    asked = {"config": to_plain(config), "folder": str(folder)}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "trainctl.train.trace_entry"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise _failed(config, f"not done after {SECONDS} s") from None
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (ended.stderr.strip().splitlines() or ["no word"])[-1]
        raise _failed(config, f"its process ended with {ended.returncode}: {last[:300]}") from None
    if "error" in answer:
        raise TrainctlError.from_findings([_finding(answer["error"])])
    traced: dict[str, Any] = answer["traced"]
    return traced


def _failed(config: RunConfig, why: str) -> TrainctlError:
    where = config.model.path or config.model.factory
    message = f"the model of {where} cannot be traced: {why}"
    return TrainctlError.from_findings([Finding(rule=NOT_TRACED, key="model", message=message)])


def _finding(told: dict[str, Any]) -> Finding:
    texts = {name: told[name] for name in ("rule", "key", "message", "hint")}
    return Finding(**texts, exit_code=ExitCode(told["exit_code"]))


def _key(config: RunConfig, folder: Path) -> str:
    """A digest of all that a trace depends on."""
    model = to_plain(config.model)
    for name in ("name", "weights", "initial_weights", "tensors"):
        del model[name]
    parts = [
        model,
        repr(load("model", config.model.family)),
        to_plain(config.precision),
        config.training.sequence_length,
        config.data.mask_documents,
        {package: _version(package) for package in PACKAGES},
        list(_files(config, folder)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _files(config: RunConfig, folder: Path) -> list[str]:
    """Digests of the files that say what the model is."""
    model, found = config.model, []
    if model.path and model.is_directory:
        found.append(Path(model.path) / "config.json")
        found += sorted(Path(model.path).glob("*.py")) if model.trust_remote_code else []
    if model.factory:
        found += sorted(folder.glob("*.py"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in found if path.is_file()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _file(key: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(cache) / "trainctl" / "traces" / f"{key}.json"


def _keep(key: str, traced: dict[str, Any]) -> None:
    """Write it for later commands; one that cannot be written is traced again."""
    path = _file(key)
    part = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": FORMAT, "traced": traced}), encoding="utf-8")
        part.replace(path)
    except OSError:
        return
