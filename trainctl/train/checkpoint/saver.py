"""Asynchronous checkpoints: copied to host memory, then written while training continues.

The loop waits only for the copy. One thread on each rank writes and commits, over a process group
of its own, so that its collectives never mix with the loop's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from trainctl.config.schema import CheckpointConfig
from trainctl.engines.process import Process
from trainctl.runs.layout import RunPaths
from trainctl.train.checkpoint.optimizer_state import OptimizerState
from trainctl.train.checkpoint.save import RankPart, rank_part, write_checkpoint
from trainctl.train.models.tensors import Buffer


@dataclass(frozen=True, slots=True)
class Saved:
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


class Saver:
    """Saves the optimizer's state; all ranks call the same methods in the same order.

    States on NVMe may be larger than host memory, so they are not copied: such a state is
    written while the loop waits.

    Args:
        config: Whether to write asynchronously, and which checkpoints to keep.
        weights_in: Type of the weights in weights-only checkpoints.
        buffers: Buffers of the model that this rank writes.
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
        self._error: BaseException | None = None
        self._saved: SimpleQueue[Saved] = SimpleQueue()

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

    def take_saved(self) -> list[Saved]:
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
        except BaseException as error:  # whatever it is, the loop raises it
            self._error = error

    def _write(
        self, part: RankPart, facts: dict[str, Any], started: float, stalled: float | None
    ) -> None:
        config, weights_only = self._config, facts["weights_only"]
        path = write_checkpoint(
            self._run,
            self._process,
            part,
            facts,
            keep=config.weights_only_keep if weights_only else config.keep,
            best_of=None if weights_only else config.best_of,
        )
        seconds = time.monotonic() - started
        stall = seconds if stalled is None else stalled
        self._saved.put(Saved(facts["step"], path, weights_only, seconds, stall))
