"""Store of a teacher's log-probabilities: the most probable tokens of each position. No torch.

A store belongs to the samples of one length in one split of a corpus. Only positions with a label
are in it. Consecutive samples form a share, which is one file:

    teacher-KEY/teacher.json  identity of the store, from which KEY is computed; written first
    teacher-KEY/000012.bin    a share:
        u64 (samples + 1)     number of the first row of each sample, and the number of rows
        rows                  `row_type`, in the order of the text

A file is written under a temporary name, so a share is whole or missing. The division into shares
depends on the samples alone: a pass that was killed goes on on any layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.data.cache_files import map_array
from trainctl.data.tokenizer import FileTokenizer, Tokenizer, dtype_for, load_tokenizer
from trainctl.errors import MachineError, TrainctlError
from trainctl.models.local_path import is_there, local_path
from trainctl.options.objective.distill import DistillConfig
from trainctl.readers.files import digest_of
from trainctl.runs.attempts import config_of
from trainctl.runs.files import write_bytes, write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST

FORMAT = 1
RECORD = "teacher.json"

SHARE_POSITIONS = 1 << 18
"""Most positions of a share: about 100 MB with 64 tokens in fp16, so that a kill costs little."""
MIN_SHARES = 64
"""Shares that small corpora are divided into, so that there is one for every rank."""


def row_type(vocab_size: int, top_k: int, values: str) -> np.dtype[Any]:
    """Return the type of a row: what the teacher gives for one position.

    Args:
        values: Number format of the log-probabilities: `fp16` or `fp32`.
    """
    return np.dtype(
        [
            ("place", "<u4"),  # position in the sample
            ("tail", "<f4"),  # log-probability of all other tokens together
            ("ids", dtype_for(vocab_size), (top_k,)),
            ("log_probabilities", f"<f{int(values[2:]) // 8}", (top_k,)),
        ]
    )


class TeacherStore:
    """A store, which need not be complete yet.

    As an array (`objective.stored`) it has a row for each sample, int32 of the shape (length,
    2 k + 1): k ids, then the bits of k + 1 fp32 numbers, which are the log-probabilities of these
    ids and of all other tokens together. Positions without a label have ids from 0 and zeros.

    Args:
        base: Folder of stores.
        identity: Everything that the values depend on, as plain data. `samples`, `length`,
            `vocab_size`, `top_k` and `values` describe the rows. `teacher` is the digest of its
            weights; None is no teacher's, whose store nobody has written.
    """

    def __init__(self, base: Path, identity: Mapping[str, Any]) -> None:
        self.identity = {"format": FORMAT, **identity}
        key = digest_of(json.dumps(self.identity, sort_keys=True))[:24]
        self.folder = base / f"teacher-{key}"
        self._count, self._length = identity["samples"], identity["length"]
        self._top_k = identity["top_k"]
        self._type = row_type(identity["vocab_size"], self._top_k, identity["values"])
        by_size = max(1, SHARE_POSITIONS // self._length)
        self._each = max(1, min(by_size, -(-self._count // MIN_SHARES)))
        self._mapped: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}

    def begin(self) -> None:
        """Make the folder with the store's identity, for other processes to write shares into.

        Raises:
            TrainctlError: The folder cannot be written (exit code 4).
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / RECORD).is_file():
                write_json(self.folder / RECORD, self.identity)
        except OSError as error:
            raise self._write_error(error) from None

    def missing(self) -> list[int]:
        """Return the numbers of the shares that are not stored yet, or that are damaged."""
        return [each for each in range(-(-self._count // self._each)) if not self._is_whole(each)]

    def samples(self, share: int) -> range:
        """Return the indices of a share's samples."""
        return range(share * self._each, min((share + 1) * self._each, self._count))

    def write(self, share: int, rows: Sequence[npt.NDArray[Any]]) -> None:
        """Write a share.

        Args:
            rows: Rows of each of its samples, of `row_type`.

        Raises:
            TrainctlError: The file cannot be written (exit code 4).
        """
        firsts = np.cumsum([0, *(len(each) for each in rows)], dtype="<u8")
        joined = np.concatenate([*rows, np.empty(0, self._type)])
        try:
            write_bytes(self._path(share), firsts.tobytes() + joined.tobytes())
        except OSError as error:
            raise self._write_error(error) from None

    def rows(self, count: int) -> npt.NDArray[Any]:
        """Return uninitialized rows for `count` positions."""
        return np.empty(count, self._type)

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the samples at `indices`, (samples, length, 2 k + 1)."""
        k = self._top_k
        found = np.zeros((len(indices), self._length, 2 * k + 1), np.int32)
        found[..., :k] = np.arange(k)
        values = found[..., k:].view(np.float32)
        for number, index in enumerate(indices.tolist()):
            share, place = divmod(index, self._each)
            firsts, rows = self._map(share)
            own = rows[int(firsts[place]) : int(firsts[place + 1])]
            places = own["place"]
            found[number, places, :k] = own["ids"]
            values[number, places, :k] = own["log_probabilities"]
            values[number, places, k] = own["tail"]
        return found

    def _path(self, share: int) -> Path:
        return self.folder / f"{share:06d}.bin"

    def _is_whole(self, share: int) -> bool:
        """Return True if a share's file exists and is as long as it says."""
        count, path = len(self.samples(share)), self._path(share)
        try:
            with path.open("rb") as stream:
                stream.seek(8 * count)
                total = int.from_bytes(stream.read(8), "little")
            return path.stat().st_size == 8 * (count + 1) + total * self._type.itemsize
        except OSError:
            return False

    def _map(self, share: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the first rows of a share's samples and its rows, memory-mapped."""
        if share not in self._mapped:
            count, path = len(self.samples(share)), self._path(share)
            try:
                firsts = np.fromfile(path, "<u8", count + 1)
                rows = map_array(path, self._type, 8 * (count + 1))
            except (OSError, ValueError) as error:
                raise MachineError(
                    f"cannot read the teacher's log-probabilities, {path}: {error}",
                    hint="remove the file: the next attempt computes it again",
                ) from None
            self._mapped[share] = firsts, rows
        return self._mapped[share]

    def _write_error(self, error: OSError) -> TrainctlError:
        return MachineError(
            f"cannot write the teacher's log-probabilities, {self.folder}: "
            f"{error.strerror or error}",
            hint="free space there, or name another folder in objective.teacher_log_probabilities",
        )


def stored_teachers(base: Path, identity: Mapping[str, Any]) -> dict[str, Path]:
    """Return the teachers that have a whole store in `base`, each with its folder.

    Args:
        identity: Identity of the store but for its teacher.
    """
    teachers = {}
    for record in base.glob(f"teacher-*/{RECORD}"):
        try:
            found = json.loads(record.read_bytes())
            same = found == {"format": FORMAT, **identity, "teacher": found["teacher"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if same and not TeacherStore(base, found).missing():
            teachers[str(found["teacher"])] = record.parent
    return teachers


def config_of_teacher(path: Path) -> RunConfig | None:
    """Return the configuration of a run or of a checkpoint's run; None for another directory.

    Raises:
        TrainctlError: The run is damaged (exit code 5).
    """
    if (path / MANIFEST).is_file():
        return config_of(RunPaths(path.resolve().parents[1]))
    return config_of(RunPaths(path)) if (path / "checkpoints").is_dir() else None


def check_teacher(config: RunConfig, student: Tokenizer) -> None:
    """Refuse a teacher whose ids stand for other tokens than the student's.

    Raises:
        TrainctlError: The tokenizers differ, or the teacher has none; names some of the ids.
    """
    objective = config.objective
    if not isinstance(objective, DistillConfig) or objective.teacher is None:
        return
    path = local_path(objective.teacher)
    if not is_there(path):  # the run has what it needs of it, or names it where it does not
        return
    other = config_of_teacher(path)
    if other is None and not (path / "tokenizer.json").is_file():
        if student.file is None:
            return  # exports of such runs have no tokenizer files either
        raise TrainctlError(
            f"objective.teacher={path} has no tokenizer.json to compare with the student's "
            "tokenizer",
            hint="copy it there; a run of trainctl is named as objective.teacher=RUN",
        )
    section = new_section("tokenizer", "hf", path=str(path)) if other is None else other.tokenizer
    problem = _different_ids(student, load_tokenizer(section))
    if problem:
        raise TrainctlError(
            f"objective.teacher={path} has another tokenizer than the student: {problem}",
            hint="probabilities of the same tokens are compared: take a teacher of the student's "
            "family",
        )


def _different_ids(student: Tokenizer, teacher: Tokenizer) -> str:
    """Describe ids that stand for different tokens; empty if there are none."""
    if student.fingerprint == teacher.fingerprint:
        return ""
    if not isinstance(student, FileTokenizer) or not isinstance(teacher, FileTokenizer):
        return "one has a file and the other none"
    ours, theirs = (
        {number: token for token, number in each.vocabulary().items()}
        for each in (student, teacher)
    )
    different = [number for number in sorted(ours) if theirs.get(number) != ours[number]]
    some = ", ".join(
        f"{number} is {ours[number]!r} and there {theirs.get(number, 'nothing')!r}"
        for number in different[:3]
    )
    return f"{len(different):,} of {len(ours):,} ids differ: {some}" if different else ""
