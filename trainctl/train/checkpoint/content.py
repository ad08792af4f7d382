"""The whole state of a run, stored independently of the layout, and its reading on any layout.

Each rank writes the optimizer tensors that it holds (master weights and every state) to one
safetensors file. The manifest records which elements of which parameter lie where, so a loader on
any layout reads the ranges that it needs. No file is ever unpickled. `save` writes checkpoints.

Tensor files are written here in one pass, with a checksum of the bytes: safetensors' own writer
first copies every tensor in host memory, and gives none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainctl.config.schema import ModelConfig
from trainctl.engines.process import Process
from trainctl.engines.shards import Fragment, Shard, read_shard, read_whole
from trainctl.errors import RunStateError, TrainctlError
from trainctl.plans.identity import (
    NON_OPTIMIZER_STATES,
    check_model,
    check_shapes,
    optimizer_mismatch,
)
from trainctl.runs import checkpoints
from trainctl.runs.files import open_as_its_folder
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST, read_manifest, verify_files
from trainctl.train.checkpoint.optimizer_state import AVERAGE, MASTER, OptimizerState
from trainctl.train.optimizers.partitioned import SideState


@dataclass(slots=True)
class RunProgress:
    """Progress counters of a run, which a resume needs besides the tensors."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Next sample counter; not step x batch, since batches may be skipped or grow."""
    tokens: int = 0
    """Tokens trained on."""


class CheckpointReader:
    """A committed checkpoint, read by ranges.

    It is also a weight source, of the master weights or of their average.

    Args:
        passed_over: Problems of newer checkpoints that were skipped for this one.
        weights: Weights that `read` returns: `MASTER` or `AVERAGE`.

    Raises:
        TrainctlError: `weights` is `AVERAGE`, and the checkpoint has no average.
    """

    def __init__(
        self, path: Path, passed_over: Sequence[str] = (), *, weights: str = MASTER
    ) -> None:
        self.path = path
        self._weights = weights
        self.passed_over = tuple(passed_over)
        self.manifest = read_manifest(path)
        if weights == AVERAGE and not self.has_average:
            raise RunStateError(
                f"{path.name} has no average of the weights",
                hint="--weights raw; training.ema_decay keeps one from the next attempt on",
            )
        self._fragments: dict[str, dict[Shard, list[dict[str, Any]]]] = {}
        for fragment in self.manifest["fragments"]:
            name = fragment["parameter"]
            whole = Shard.whole(torch.Size(self.manifest["shapes"][name]))
            shard = Shard(*fragment["shard"]) if "shard" in fragment else whole
            self._fragments.setdefault(name, {}).setdefault(shard, []).append(fragment)
        self._open: dict[str, Any] = {}
        self.verified = (0.0, 0)
        """Seconds and bytes of the files that this rank has verified."""

    @property
    def has_average(self) -> bool:
        """Whether it holds the moving average of the weights."""
        return AVERAGE in self.manifest["states"]

    @property
    def progress(self) -> RunProgress:
        return RunProgress(self.manifest["step"], self.manifest["samples"], self.manifest["tokens"])

    def check(self, model: ModelConfig, shapes: Mapping[str, list[int]]) -> None:
        """Refuse a checkpoint of another model, or one with tensors that the model lacks.

        Loading reads the tensors of the model and would not notice others in the checkpoint.

        Raises:
            TrainctlError: The checkpoint is of another model (exit code 5); says what differs.
        """
        check_model(model, self.path.name, self.manifest)
        check_shapes(self.path.name, self.manifest, shapes)

    def check_states(self, wanted: Collection[str]) -> None:
        """Refuse a checkpoint whose optimizer states differ from the wanted ones.

        Args:
            wanted: Names of the states on all ranks, of any size, without the master weights.

        Raises:
            TrainctlError: The checkpoint has other states (exit code 5).
        """
        had = set(self.manifest["states"]) - NON_OPTIMIZER_STATES
        for fragment in self.manifest["fragments"]:
            had |= fragment.get("sides", {}).keys()
        if self.was_updated and had != set(wanted):
            raise optimizer_mismatch(self.path.name, had, wanted)

    @property
    def was_updated(self) -> bool:
        """Whether it was taken after the first update, and so has optimizer states."""
        states = set(self.manifest["states"]) - NON_OPTIMIZER_STATES
        return bool(states) or bool(self.manifest["scalars"])

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a parameter's weights."""
        saved = self.manifest["shapes"].get(name)
        if saved != list(shape):
            raise RunStateError(
                f"{self.path.name}: {name} has shape {saved}, the model's is {list(shape)}",
                hint="a run's model cannot change; start a new run",
            )
        return self.read_state(name, self._weights, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a persistent buffer, flat; None if an older version did not save it."""
        for entry in self.manifest.get("buffers", []):
            if entry["name"] == name:
                return self._slice(entry["file"], entry["key"])[:]
        return None

    def load_into(self, state: OptimizerState) -> None:
        """Fill the master weights and every optimizer state that this rank holds.

        If the checkpoint has no average, the average starts from its master weights.
        """
        fragments: dict[int, list[Fragment]] = defaultdict(list)
        for fragment in state.fragments:
            fragments[fragment.tensor].append(fragment)
        for index in range(len(state.tensors)):  # even a tensor that holds only padding here
            with state.swapped_in(index, changes=True):
                if self.was_updated:
                    state.create(index, self.manifest["scalars"])
                for fragment in fragments[index]:
                    names = state.state_names(index)
                    self._load_fragment(state, fragment, names)
                    for name, side in state.sides(fragment).items() if self.was_updated else ():
                        side.values.copy_(self._read_side(fragment.name, name, side))
        state.restore_scalars(self.manifest["scalars"])

    def _load_fragment(self, state: OptimizerState, fragment: Fragment, names: list[str]) -> None:
        end = fragment.start + fragment.numel
        shard = fragment.shard or Shard.whole(torch.Size(self.manifest["shapes"][fragment.name]))
        for name in (MASTER, *names):
            target = fragment.of(state.tensor(fragment.tensor, name))
            source = MASTER if name == AVERAGE and not self.has_average else name
            values = read_shard(
                partial(self.read_state, fragment.name, source), shard, fragment.start, end
            )
            target.copy_(values.view(target.shape))

    def _read_side(self, parameter: str, state: str, side: SideState) -> torch.Tensor:
        """Return the values of a state whose size differs from the parameter's."""
        result = torch.empty_like(side.values, device="cpu")
        missing = torch.ones_like(result, dtype=torch.bool)
        end = side.start + side.values.numel()
        for fragments in self._fragments.get(parameter, {}).values():
            for fragment in fragments:
                start, numel, key = fragment.get("sides", {}).get(state, (0, 0, ""))
                first, last = max(start, side.start), min(start + numel, end)
                if first < last:
                    values = self._slice(fragment["file"], key)[first - start : last - start]
                    result[first - side.start : last - side.start] = values
                    missing[first - side.start : last - side.start] = False
        if missing.any():
            raise RunStateError(
                f"{self.path.name}: {int(missing.sum())} values of {parameter} ({state}) "
                "are missing",
            )
        return result

    def close(self) -> None:
        """Close the files. Pages that were read from a mapped file stay in memory until then."""
        self._open.clear()

    def read_state(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a state of a whole, flattened parameter, in fp32."""
        parts = {
            shard: partial(self._read_fragments, parameter, state, fragments)
            for shard, fragments in self._fragments.get(parameter, {}).items()
        }
        try:
            return read_whole(parts, start, end)
        except ValueError as error:
            raise RunStateError(f"{self.path.name}: {parameter}: {error}") from None

    def _read_fragments(
        self, parameter: str, state: str, fragments: list[dict[str, Any]], start: int, end: int
    ) -> torch.Tensor:
        """Return elements [start, end) of a flattened shard."""
        result = torch.empty(end - start)
        missing = end - start
        for fragment in fragments:
            first = max(start, fragment["start"])
            last = min(end, fragment["start"] + fragment["numel"])
            if first < last:
                shift = fragment["offset"] - fragment["start"]
                values = self._slice(fragment["file"], f"{state}/{fragment['tensor']}")
                result[first - start : last - start] = values[first + shift : last + shift]
                missing -= last - first
        if missing:
            raise RunStateError(
                f"{self.path.name}: {missing} elements of {parameter} ({state}) are missing",
            )
        return result

    def _slice(self, file: str, key: str) -> Any:
        """Return a tensor of one of the files, to be read by ranges."""
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt")
        try:
            return self._open[file].get_slice(key)
        except SafetensorError:
            raise RunStateError(f"{self.path.name}: {file} has no {key}") from None


def newest_valid_checkpoint(run: RunPaths, process: Process) -> CheckpointReader | None:
    """Return a run's newest checkpoint with intact content; None if the run has no checkpoint.

    The first rank lists the folder, so that all ranks read the same checkpoint. Skipped
    checkpoints are named in its log and in the result. A skipped checkpoint with the right
    sizes but wrong content is set aside, since it would otherwise count as the newest.

    Raises:
        TrainctlError: There are checkpoints and none is intact. Starting from scratch without being
            told to would throw the run away.
    """
    candidates: list[Path] = []
    passed_over: list[str] = []
    if process.is_first:
        checkpoints.clean_temporary(run)
        candidates, passed_over = _newest_first(run)
    candidates, passed_over = process.broadcast_from_first((candidates, passed_over))
    damaged: list[Path] = []
    chosen: Path | None = None
    read = (0.0, 0)
    for path in candidates:
        problems, read = _verify_together(path, process)
        if not problems:
            chosen = path
            break
        damaged.append(path)
        passed_over += problems
    if process.is_first:
        for problem in passed_over:
            print(f"checkpoint passed over: {problem}", flush=True)
    if chosen is None:
        if passed_over:
            raise RunStateError(
                f"no checkpoint of the run is intact: {'; '.join(passed_over)}",
                hint=f"to begin anew all the same: trainctl resume {run.root} --from-start",
            )
        return None
    if process.is_first:
        for path in damaged:
            checkpoints.quarantine_checkpoint(path)
    reader = CheckpointReader(chosen, passed_over)
    reader.verified = read
    return reader


def find_weights_checkpoint(path: Path, process: Process) -> CheckpointReader | None:
    """Return the checkpoint to take only weights from: the folder itself, or the newest of a run.

    A weights-only checkpoint is as good as a full one.

    Returns:
        None if the folder is neither a run nor a checkpoint.

    Raises:
        TrainctlError: The checkpoint is damaged, or the run has none.
    """
    if (path / MANIFEST).is_file():
        problems, _ = _verify_together(path, process)
    elif (path / "checkpoints").is_dir():
        found, problems = _newest_first(RunPaths(path), weights_only=True)
        problems = problems or [f"{path} has no checkpoint"]
        for path in found:
            problems, _ = _verify_together(path, process)
            if not problems:
                break
    else:
        return None
    if problems:
        raise TrainctlError(f"model.initial_weights: {'; '.join(problems)}")
    return CheckpointReader(path)


def _newest_first(run: RunPaths, *, weights_only: bool = False) -> tuple[list[Path], list[str]]:
    """Return the complete checkpoints, newest first, and the problems of the others.

    Only names and sizes of the files are checked.
    """
    looks = checkpoints.examine_checkpoints(run)
    if weights_only:  # a step's full checkpoint comes first: its weights are more precise
        looks = [*checkpoints.examine_checkpoints(run, weights_only=True), *looks]
    looks = sorted(looks, key=lambda look: look.step)[::-1]
    whole = [look.path for look in looks if look.info is not None]
    return whole, [look.problem for look in looks if look.info is None]


def _verify_together(path: Path, process: Process) -> tuple[list[str], tuple[float, int]]:
    """Return the problems of a checkpoint, and seconds and bytes of this rank's share of files.

    All ranks call it together.
    """
    started, size = time.monotonic(), 0
    try:
        manifest = read_manifest(path)
        mine = manifest["files"][process.rank :: process.world_size]
        problems = verify_files(path, manifest, mine)
        size = sum(entry["bytes"] for entry in mine)
    except ValueError as error:
        problems = [str(error)]
    read = time.monotonic() - started, size
    found: list[str] = []
    for share in process.gather(problems):
        found += [problem for problem in share if problem not in found]
    return found, read


_TYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_stream(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write tensors to a new safetensors file as they come, and sync it.

    Args:
        path: The file, which must not exist.
        tensors: The tensors in the order of `layout`, whole or in pieces; each is written before
            the next is taken.

    Returns:
        Size in bytes and SHA-256 of the file.

    Raises:
        OSError: The file cannot be written.
    """
    digest = hashlib.sha256()
    header = memoryview(encode_header(layout, metadata))
    with open(path, "xb", opener=open_as_its_folder) as file:
        for raw in chain((header,), map(raw_bytes, tensors)):
            file.write(raw)
            digest.update(raw)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the bytes of a safetensors file up to the first tensor."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _TYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's elements as the bytes of a safetensors file."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
