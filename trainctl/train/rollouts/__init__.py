"""Rollouts: answers that the model in training writes to prompts, for an objective to judge.

Tokens are sampled by counters: each random number is a function of its place alone. A run keeps
answers while it samples them, so that no kill loses a finished one. The answers of a phase are in a
folder of its own, whose name has the identity of the weights and settings that they come from. Each
rank appends a line of JSON for each finished answer to a file of its own. A line that a kill cut
off is no JSON, and is left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from trainctl.runs.files import ensure_folder, open_as_its_folder


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One answer to generate."""

    prompt: tuple[int, ...]
    """Token ids of the prompt; at least one."""
    number: int
    """Number of the prompt among all prompts of the run. A prompt that comes again, in a later
    epoch, needs another number to get other answers.
    """
    sample: int
    """Number of the answer among the answers to this prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated answer."""

    ids: np.ndarray
    """Token ids, (tokens,) int64, with the token that ended the answer."""
    log_probabilities: np.ndarray
    """Log-probability of each token in nats, (tokens,) fp32, under the distribution that
    `trainctl.train.rollouts.Sampler` names.
    """
    is_finished: bool
    """Whether the answer ended by itself; False if it was cut at the most tokens allowed."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Settings by which tokens are drawn from logits.

    The log-probability of a token is under the softmax of logits / temperature over the whole
    vocabulary. `top_k` and `top_p` decide which tokens can be drawn, and do not renormalise it
    (docs/decisions/049-rollouts.md says why).
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    """Draw from the fewest most probable tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Draw from this many most probable tokens; 0 from all. Equally probable tokens stay together,
    so that no order of equals matters.
    """

    def numbers(self, number: int, sample: int, count: int) -> np.ndarray:
        """Return the random numbers in [0, 1) of an answer's first `count` tokens, fp64.

        numpy's Philox4x64-10 (Random123, SC 2011): the seed is its key, prompt and sample are words
        of its counter, and the position is the place in the stream that begins there.
        """
        generator = np.random.Philox(key=self.seed, counter=[0, number, sample, 0])
        # Only the raw stream is guaranteed to stay the same in all versions of numpy (NEP 19).
        bits: np.ndarray = np.atleast_1d(generator.random_raw(count)) >> np.uint64(11)
        return bits * 2.0**-53

    def draw(
        self, logits: torch.Tensor, numbers: torch.Tensor, vocab_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the drawn tokens, (rows,) int64, and their log-probabilities, (rows,) fp32.

        Args:
            logits: (rows, vocabulary), any floating type.
            numbers: Random number of each row, (rows,) fp64.
            vocab_size: Number of ids to draw from, from 0; None is all. The softmax is over the
                logits beyond them too, as the trainer's is.
        """
        scores = (logits.float() / self.temperature).log_softmax(dim=-1)
        # Integers: a sum of floating-point numbers has no fixed order on a GPU. They are summed in
        # order of ids: rounding moves a token's borders, never its place.
        shares = (scores[:, :vocab_size].exp().double() * 2.0**52).long()
        borders = self._truncated(shares).cumsum(dim=-1)
        total = borders[:, -1]
        place = torch.minimum((numbers * total).long(), total - 1)
        tokens = torch.searchsorted(borders, place[:, None], right=True)
        tokens = tokens.clamp(max=borders.shape[-1] - 1)  # of NaN it is beyond; the loss tells
        return tokens[:, 0], scores.gather(-1, tokens)[:, 0]

    def _truncated(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the shares with zeros in place of those that cannot be drawn."""
        if 0 < self.top_k < shares.shape[-1]:
            shares = shares.where(shares >= shares.topk(self.top_k).values[:, -1:], 0)
        if self.top_p < 1:
            ordered = shares.sort(dim=-1, descending=True).values
            before = ordered.cumsum(dim=-1) - ordered
            # Relative to the sum: after `top_k` it is below 1.
            is_kept = before < self.top_p * ordered.sum(dim=-1, keepdim=True)
            shares = shares.where(
                shares >= ordered.where(is_kept, ordered[:, :1]).amin(-1, True), 0
            )
        return shares


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
