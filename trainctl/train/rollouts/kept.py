"""Answers that a run keeps while it samples them, so that no kill loses a finished one.

The answers of a phase are in a folder of its own, whose name has the identity of the weights and
settings that they come from. Each rank appends a line of JSON for each finished answer to a file of
its own. A line that a kill cut off is no JSON, and is left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainctl.runs.files import ensure_folder, open_as_its_folder

AnswerKey = tuple[int, int]
"""Number of a prompt, and of the answer among its answers."""

_ARRAYS = {"ids": "<i4", "sampled": "<f4", "old": "<f4", "reference": "<f4"}
"""Fields of an answer that are arrays with a value for each token, and how they are stored."""


def folder_name(step: int, identity: Mapping[str, Any]) -> str:
    """Return the name of the folder of the phase that begins after `step` steps."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"step-{step:08d}-{digest[:16]}"


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name; None if it is not the folder of a phase."""
    parts = folder.name.split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else None


def drop_phases(root: Path, keep: Path, *, before: int) -> None:
    """Remove the phases of earlier steps, and those of the same step with another identity."""
    with suppress(OSError):
        for folder in root.iterdir():
            step = step_of(folder)
            if step is not None and (step < before or step == step_of(keep)) and folder != keep:
                shutil.rmtree(folder, ignore_errors=True)


def read_answers(folder: Path) -> dict[AnswerKey, dict[str, Any]]:
    """Return the fields of all kept answers; empty if there is no folder."""
    found: dict[AnswerKey, dict[str, Any]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError, KeyError, TypeError):
                fields = json.loads(line)
                key = int(fields.pop("prompt")), int(fields.pop("sample"))
                for name in _ARRAYS.keys() & fields.keys():
                    stored = base64.b64decode(fields[name], validate=True)
                    fields[name] = np.frombuffer(stored, _ARRAYS[name])
                found.setdefault(key, {}).update(fields)
    return found


class AnswerWriter:
    """Appends to this rank's file of a phase."""

    def __init__(self, folder: Path, rank: int) -> None:
        ensure_folder(folder.parent)
        ensure_folder(folder)
        path = folder / f"rank-{rank}.jsonl"
        self._file: BinaryIO = open(path, "ab", opener=open_as_its_folder)  # noqa: SIM115
        self._file.write(b"\n")  # ends a line that a kill cut off

    def add(self, key: AnswerKey, **fields: Any) -> None:
        """Append fields of an answer."""
        plain = {
            name: _as_text(value, _ARRAYS[name]) if name in _ARRAYS else value
            for name, value in fields.items()
        }
        line = json.dumps({"prompt": key[0], "sample": key[1], **plain})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _as_text(values: npt.NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.asarray(values).astype(kind).tobytes()).decode()
