"""Writing checkpoints: every rank writes its fragments, then all commit together or not at all.

An asynchronous save blocks the loop only while the state is copied to host memory. One thread on
each rank writes and commits, over a process group of its own, so that its collectives never mix
with the loop's.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from trainctl import __version__
from trainctl.config.quantities import disk_text
from trainctl.config.schema import CheckpointConfig
from trainctl.engines.process import Process
from trainctl.engines.shards import Fragment
from trainctl.errors import MachineError
from trainctl.models.hf_weights import Buffer
from trainctl.runs import checkpoints
from trainctl.runs.files import ensure_folder, make_folder
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import FORMAT, amend_manifest, write_manifest
from trainctl.runs.mirror_state import kept_for_mirror
from trainctl.train.checkpoint.content import write_stream
from trainctl.train.checkpoint.optimizer_state import MASTER, OptimizerState

Result = TypeVar("Result")

Written = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], float]
"""Manifest entries of a rank's file: the file, its fragments, its buffers; seconds of writing."""

MANIFEST_BYTES = 512
"""Generous estimate of the manifest's size per tensor and per fragment."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """Part of a checkpoint that one rank writes."""

    states: list[str]
    """Names of the optimizer's tensor states."""
    scalars: dict[str, float]
    """Optimizer states that are one number."""
    fragments: list[Fragment]
    """Fragments that this rank owns."""
    sides: list[dict[str, tuple[int, int, str]]]
    """States of each fragment that are not as large as it, by name: index of the first value
    within the parameter's whole state, number of values, and the tensor's name in the file.
    """
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape of each tensor in the file, by name."""
    tensors: Callable[[], Iterator[torch.Tensor]]
    """Yields the tensors in the order of `layout`, each valid until the next is taken."""
    buffers: dict[str, str]
    """Canonical names of the model's buffers, by their tensor's name in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk: tensors and this rank's share of the manifest."""
        tensors = sum(math.prod(shape) * kind.itemsize for kind, shape in self.layout.values())
        return tensors + MANIFEST_BYTES * (len(self.layout) + len(self.fragments))


def rank_part(
    state: OptimizerState, buffers: Iterable[Buffer] = (), weights_in: torch.dtype | None = None
) -> RankPart:
    """Return this rank's part of a checkpoint of the optimizer's current state.

    Args:
        buffers: Buffers of the model that this rank writes, unchanged.
        weights_in: Type of a weights-only checkpoint; None saves everything in its own type.
    """
    state.sync_master_weights()
    fragments = [fragment for fragment in state.fragments if fragment.owned]
    indices = sorted({fragment.tensor for fragment in fragments})
    everything = weights_in is None
    names = {
        index: (MASTER, *(state.state_names(index) if everything else ())) for index in indices
    }
    scalars = state.scalars() if everything else {}
    beside: dict[str, torch.Tensor] = {}
    sides: list[dict[str, tuple[int, int, str]]] = []
    for number, fragment in enumerate(fragments):
        sides.append({})
        for name, side in state.sides(fragment).items() if scalars else ():
            if side.is_saved_here:
                key = f"{name}/beside-{number}"
                beside[key] = side.values
                sides[-1][name] = (side.start, side.values.numel(), key)

    kept = {f"buffer/{buffer.name}": buffer for buffer in buffers}
    beside |= {key: buffer.tensor.reshape(-1) for key, buffer in kept.items()}

    def tensors() -> Iterator[torch.Tensor]:
        for index in indices:
            with state.swapped_in(index):
                for name in names[index]:
                    values = state.saved(index, name)
                    # Convert on the host: the device may have no room for another copy.
                    yield values if everything else values.cpu().to(weights_in)
        yield from beside.values()

    layout = {
        f"{name}/{index}": (weights_in or state.tensor(index, name).dtype, (state.numel(index),))
        for index in indices
        for name in names[index]
    }
    return RankPart(
        states=sorted({name for listed in names.values() for name in listed} - {MASTER}),
        scalars=scalars,
        fragments=fragments,
        sides=sides,
        layout=layout | {key: (value.dtype, tuple(value.shape)) for key, value in beside.items()},
        tensors=tensors,
        buffers={key: buffer.name for key, buffer in kept.items()},
    )


def write_checkpoint(
    run: RunPaths,
    process: Process,
    part: RankPart,
    facts: dict[str, Any],
    config: CheckpointConfig,
) -> tuple[Path, list[tuple[float, int]]]:
    """Write a checkpoint to a temporary folder, commit it, then rotate older ones; on all ranks.

    Args:
        process: This rank, with a control group that no other thread uses.
        facts: Manifest entries that do not depend on the ranks' fragments, `weights_only` among
            them.

    Returns:
        The committed folder; seconds and bytes of each rank's file.

    Raises:
        TrainctlError: A rank could not write. Nothing is left of this checkpoint; older ones stay.
    """
    step: int = facts["step"]
    weights_only: bool = facts["weights_only"]
    states = process.gather(part.states)  # a pipeline stage may have fewer than another
    folder = checkpoints.temporary_path(run, step, weights_only=weights_only)
    reached = partial(inject_fault, rank=process.rank, step=step)
    (needed,) = process.sum(part.num_bytes)

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        ensure_folder(run.checkpoints)
        make_folder(folder)
        check_space(folder, int(needed))

    def finish() -> None:
        reached("manifest")
        write_manifest(folder, _build_manifest(facts, part, states, written))
        checkpoints.commit_checkpoint(run, step, reached, weights_only=weights_only)

    _run_on_all_ranks(process, folder, prepare if process.is_first else _do_nothing)
    written = _run_on_all_ranks(
        process, folder, lambda: _write_part(folder, process.rank, part, reached)
    )
    _run_on_all_ranks(process, folder, finish if process.is_first else _do_nothing)
    if process.is_first:
        _rotate(run, config, reached, weights_only=weights_only)
    files = [(seconds, int(file["bytes"])) for file, _, _, seconds in written]
    return run.checkpoints / checkpoints.checkpoint_name(step, weights_only=weights_only), files


def _rotate(
    run: RunPaths, config: CheckpointConfig, reached: checkpoints.PhaseHook, *, weights_only: bool
) -> None:
    """Delete the checkpoints that are not to be kept; a problem is only printed."""
    keep = config.weights_only_keep if weights_only else config.keep
    spare = partial(kept_for_mirror, run, keep=keep or 1) if config.mirror else None
    try:
        checkpoints.rotate_checkpoints(
            run, config, weights_only=weights_only, spare=spare, reached=reached
        )
    except OSError as error:
        # This checkpoint is safe. If the disk fills up, the next save fails and says so.
        print(f"an old checkpoint could not be deleted: {error}", flush=True)


def _build_manifest(
    facts: dict[str, Any], part: RankPart, states: list[list[str]], written: list[Written]
) -> dict[str, Any]:
    files, fragments, buffers, _ = zip(*written, strict=True)
    return {
        **facts,
        "format": FORMAT,
        "trainctl": __version__,
        "states": [MASTER, *sorted(set(chain.from_iterable(states)))],
        "scalars": part.scalars,
        "files": [*files],
        "fragments": [*chain.from_iterable(fragments)],
        "buffers": [*chain.from_iterable(buffers)],
    }


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError if the disk is too full. A quota is noticed only while writing."""
    usage = shutil.disk_usage(folder)
    if usage.total > 0 and usage.free < needed:  # some network file systems report nothing
        raise OSError(
            errno.ENOSPC,
            f"it needs {disk_text(needed)} and {disk_text(usage.free)} are free",
            str(folder.parent),
        )


def _write_part(folder: Path, rank: int, part: RankPart, reached: checkpoints.PhaseHook) -> Written:
    """Write this rank's file; return manifest entries of file, fragments and buffers, and the
    seconds it took.
    """

    def tensors() -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(part.tensors()):
            if index == len(part.layout) // 2:
                reached("fragment")
            yield tensor

    file = f"rank-{rank:05d}.safetensors"
    started = time.monotonic()
    size, digest = write_stream(folder / file, part.layout, tensors())
    seconds = time.monotonic() - started
    buffers = [
        {"name": name, "file": file, "key": key, "numel": math.prod(part.layout[key][1])}
        for key, name in part.buffers.items()
    ]
    fragments: list[dict[str, Any]] = [
        {
            "parameter": fragment.name,
            "start": fragment.start,
            "numel": fragment.numel,
            "file": file,
            "tensor": fragment.tensor,
            "offset": fragment.offset,
            **({"shard": astuple(fragment.shard)} if fragment.shard else {}),
            **({"sides": sides} if sides else {}),
        }
        for fragment, sides in zip(part.fragments, part.sides, strict=True)
    ]
    return {"name": file, "bytes": size, "sha256": digest}, fragments, buffers, seconds


def _do_nothing() -> None:
    """Do nothing: the work of the other ranks while the first rank works."""


def _run_on_all_ranks(process: Process, folder: Path, work: Callable[[], Result]) -> list[Result]:
    """Run each rank's share of a phase and return the results by rank; on all ranks together.

    Raises:
        TrainctlError: A rank failed, on all ranks; the unfinished checkpoint is removed.
    """
    result, problem = None, ""
    try:
        result = work()
    except OSError as error:
        problem = f"rank {process.rank}: {error}"
    outcomes: list[tuple[Any, str]] = process.gather((result, problem))
    first = next((problem for _, problem in outcomes if problem), "")
    if not first:
        return [result for result, _ in outcomes]
    if process.is_first:
        shutil.rmtree(folder, ignore_errors=True)
    raise MachineError(
        f"the checkpoint could not be saved: {first}",
        hint="earlier checkpoints are untouched; free space and resume",
    )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    step: int
    """Optimizer steps done when it was taken."""
    path: Path
    weights_only: bool
    """Whether it is a weights-only checkpoint."""
    seconds: float
    """Time from the start of the save to the end of the rotation."""
    stall_seconds: float
    """Time that the training loop waited, also for an earlier save."""
    files: list[tuple[float, int]]
    """Seconds and bytes of each rank's file."""


class Saver:
    """Saves the optimizer's state; all ranks call the same methods in the same order.

    States on NVMe may be larger than host memory, so they are not copied: such a state is
    written while the loop waits.

    Args:
        config: Whether to write asynchronously, and which checkpoints to keep.
    """

    def __init__(
        self,
        run: RunPaths,
        process: Process,
        state: OptimizerState,
        config: CheckpointConfig,
        weights_in: torch.dtype = torch.float32,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        self._run, self._state, self._config = run, state, config
        self._weights_in, self._buffers = weights_in, buffers
        self._asynchronous = config.asynchronous and not process.any(state.is_swapped)
        self._process = process.with_own_group() if self._asynchronous else process
        self._copies: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        """Thread of the last save, or of an amendment, which waits for the save."""
        self._error: BaseException | None = None
        self._saved: SimpleQueue[SavedCheckpoint] = SimpleQueue()

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed on this rank: `wait` will raise it."""
        return self._error is not None

    def save(self, facts: dict[str, Any]) -> None:
        """Wait for the last save, then save, or start to if saves are asynchronous.

        Args:
            facts: Manifest entries, not to be changed afterwards; `step` and `weights_only`
                among them.

        Raises:
            TrainctlError: The last save failed, or this one if saves are synchronous.
        """
        started = time.monotonic()
        self.wait()
        weights_in = self._weights_in if facts["weights_only"] else None
        part = rank_part(self._state, self._buffers, weights_in)
        if not self._asynchronous:
            self._write(part, facts, started, stalled=None)
            return
        part = self._copy(part)
        stalled = time.monotonic() - started
        self._thread = threading.Thread(
            target=self._write_behind, args=(part, facts, started, stalled), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the last save.

        Raises:
            TrainctlError: It failed; older checkpoints stay.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def amend(self, step: int, entries: dict[str, Any], *, weights_only: bool) -> None:
        """Replace entries of a checkpoint's manifest, once the checkpoint is committed.

        A problem leaves the manifest as it is, as a kill would.

        Args:
            entries: Manifest entries that do not depend on the ranks' fragments.
        """
        if not self._process.is_first:
            return
        save = self._thread
        work = partial(self._amend_behind, save, step, entries, weights_only=weights_only)
        if save is None:
            work()
            return
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _amend_behind(
        self,
        save: threading.Thread | None,
        step: int,
        entries: dict[str, Any],
        *,
        weights_only: bool,
    ) -> None:
        if save is not None:
            save.join()
        if self._error is not None:
            return
        name = checkpoints.checkpoint_name(step, weights_only=weights_only)
        reached = partial(inject_fault, rank=self._process.rank, step=step)
        if not (self._run.checkpoints / name).is_dir():
            return
        try:
            amend_manifest(self._run.checkpoints / name, entries)
            _rotate(self._run, self._config, reached, weights_only=weights_only)
        except (OSError, ValueError) as problem:
            print(f"{name} lacks what its evaluation found: {problem}", flush=True)

    def take_saved(self) -> list[SavedCheckpoint]:
        """Return the checkpoints committed since the last call."""
        return [self._saved.get() for _ in range(self._saved.qsize())]

    def _copy(self, part: RankPart) -> RankPart:
        """Return the part with its tensors in host buffers, which the next save reuses."""
        some_on_device = False  # a partly offloaded optimizer has both kinds
        for name, tensor in zip(part.layout, part.tensors(), strict=True):
            on_device = tensor.device.type != "cpu"
            some_on_device |= on_device
            key = name, tensor.dtype
            if key not in self._copies:
                self._copies[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=on_device
                )
            self._copies[key].copy_(tensor, non_blocking=True)
        if some_on_device:
            torch.accelerator.synchronize()

        def copies() -> Iterator[torch.Tensor]:
            return (self._copies[name, kind] for name, (kind, _) in part.layout.items())

        return replace(part, tensors=copies)

    def _write_behind(
        self, part: RankPart, facts: dict[str, Any], started: float, stalled: float
    ) -> None:
        try:
            self._write(part, facts, started, stalled)
        except BaseException as error:  # any exception: the loop raises it
            self._error = error

    def _write(
        self, part: RankPart, facts: dict[str, Any], started: float, stalled: float | None
    ) -> None:
        path, files = write_checkpoint(self._run, self._process, part, facts, self._config)
        seconds = time.monotonic() - started
        stall = seconds if stalled is None else stalled
        self._saved.put(
            SavedCheckpoint(facts["step"], path, facts["weights_only"], seconds, stall, files)
        )


FAULT_VARIABLE = "TRAINCTL_FAULT"
"""Environment variable with ``phase:NAME``, then optionally ``:RANK`` (default 0) and ``:STEP`` of
the save (default any).
"""


def inject_fault(phase: str, *, rank: int, step: int) -> None:
    """Kill this process by SIGKILL if the environment asks for it at this point; for tests.

    The points are ``fragment`` (a rank's file is half written), ``manifest`` (all files are
    complete), ``rename`` (the manifest is complete too), ``pointer`` (the checkpoint has its final
    name) and ``rotation`` (an old checkpoint is about to be deleted).
    """
    wanted = os.environ.get(FAULT_VARIABLE)
    if wanted is None:
        return
    kind, name, at_rank, at_step = (*wanted.split(":"), "", "", "")[:4]
    here = (kind, name, int(at_rank or 0)) == ("phase", phase, rank)
    if here and at_step in ("", str(step)):
        os.kill(os.getpid(), signal.SIGKILL)
