"""Trial of devices: shares of a batch are computed on several devices, and checksums are written.

The gradient of the next step is computed again and again without an update. The ranks stay where
they are, and their shares rotate. A rank's own gradients are summed bit by bit before they are
reduced with those of other ranks. `trainctl.launchers.trial` compares them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainctl.engines.micro_batch import MicroBatch
from trainctl.errors import TrainctlError
from trainctl.options.callbacks import Callback, Context
from trainctl.plans.mixture import StagedBatches, stages_of_plan
from trainctl.runs.files import write_json
from trainctl.runs.replays import TrialSettings
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.nonfinite import module_paths
from trainctl.train.session import Session, seed_step


@dataclass(frozen=True, slots=True)
class Measured:
    """Loss and gradient of a repetition, over all ranks."""

    loss: float
    """Mean over `num_labels`, in nats."""
    num_labels: float
    """Number of labels (or records) that the gradient's sum is divided by."""
    grad_norm: float | None
    """Norm of the gradient; None if the trainer cannot read gradients."""


class RepeatedStep:
    """The step after those that a session has made. All ranks make the same calls together.

    Attributes:
        first_sample: Counter of the step's first sample.
        batch: Global batch of the step.

    Raises:
        TrainctlError: The engine updates weights in the backward pass, or the session was stopped
            before its last step.
    """

    def __init__(self, session: Session) -> None:
        if session.engine.updates_in_backward:
            raise TrainctlError(
                "weights are updated in the backward pass, so no step can be computed twice",
                hint="offload.zenflow=false",
            )
        self._session, progress = session, session.progress
        if progress.step != session.plan.stop_step:
            raise TrainctlError(
                f"the replay was stopped after step {progress.step:,}, "
                f"{session.plan.stop_step - progress.step:,} before the end",
                hint="a callback of yours may ask for it (callbacks)",
            )
        stages = StagedBatches(stages_of_plan(session.plan))
        self.first_sample, self.batch = stages.at(progress.step, progress.samples)
        session.engine.set_batch(self.batch)

    def measure(self, batches: Sequence[MicroBatch], data_rank: int) -> Measured:
        """Compute loss and gradient of micro-batches, and drop the gradient.

        Args:
            data_rank: Data-parallel rank whose random numbers (dropout) are drawn.
        """
        session = self._session
        data, replicas = session.mesh.data, session.mesh.replicas
        of_a_sample = replicas.size // data.size  # ranks with parts of the same samples
        replica = data_rank * of_a_sample + replicas.index % of_a_sample
        seed_step(session.plan.config.training.seed, session.progress.step, replica)
        loss, num_labels = session.engine.accumulate(batches)
        session.routers.take(session.process, session.mesh, num_labels)
        gradients = session.gradients
        norm = gradients.norms().total if gradients.are_visible else None
        session.engine.discard()
        return Measured(loss, num_labels, norm)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C1  # odd, so that no bit of an earlier micro-batch is lost


class DeviceTrial(Callback):
    """Computes the step after the last one on several devices, at the end of a replay.

    Each rank writes `trial-RANK.json`: where it is, the checksums of its memory before and after,
    and of each share that it computed, its own first and twice.
    """

    def __init__(self, session: Session, settings: TrialSettings) -> None:
        self._session, self._devices = session, settings.devices

    def on_train_end(self, context: Context) -> None:
        session, data = self._session, self._session.mesh.data
        step, gradients = RepeatedStep(session), _OwnGradients(session)
        before, shares, losses = self._memory(), [], []
        count = min(self._devices, data.size)
        # Far apart, so that they are not all on one machine.
        for shift in (0, *(place * data.size // count for place in range(count))):
            share = (data.index + shift) % data.size
            batches = session.training.of_rank(share).step(step.first_sample, step.batch)
            losses.append(step.measure(batches, share).loss)
            sums = {"loss": session.engine.summed_loss.hex(), **gradients.take()}
            shares.append({"share": share, "sums": sums})
            context.beat("trial")
        gradients.close()
        mesh, process = session.mesh, session.process
        part = mesh.replicas.index % (mesh.replicas.size // data.size)  # of a sample's sequence
        found: dict[str, Any] = {
            "rank": process.rank,
            "host": socket.gethostname(),
            "device": int(os.environ.get("LOCAL_RANK", process.rank)),
            "replica": data.index,
            "part": [mesh.pipeline.index, mesh.tensor.index, part],
            "loss": str(losses[0]),
            "shares": shares,
            "memory": [before, self._memory()],
        }
        write_json(session.run.recording / f"trial-{process.rank}.json", found)

    def _memory(self) -> dict[str, int]:
        """Return checksums of the weights and optimizer states in this rank's memory, by name."""
        engine, state = self._session.engine, self._session.state
        found = {
            f"weight {piece.name}": int(checksum(parameter))
            for parameter, piece in engine.pieces.items()
            if parameter.numel()
        }
        for index in range(len(state.tensors)):
            with state.swapped_in(index):
                for name in (MASTER, *state.state_names(index)):
                    found[f"state {name} {index}"] = int(checksum(state.tensor(index, name)))
        return found


class _OwnGradients:
    """Checksums of this rank's gradients, before they are reduced.

    Hooks of parameters get the gradient of each backward pass. An engine may gather parameters
    into others just before a module runs, so they are looked for there too.
    """

    def __init__(self, session: Session) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        engine, paths = session.engine, module_paths(session)
        for parameter, piece in engine.pieces.items():
            self._watch(parameter, piece.name)
        self._modules = [
            module.register_forward_pre_hook(partial(self._watch_gathered, paths[module]))
            for module in engine.module.modules()
        ]

    def take(self) -> dict[str, int]:
        """Return the checksums since the last call, by parameter, in the order of the backward
        pass.
        """
        found = {name: int(total) for name, total in self._sums.items()}
        self._sums = {}
        return found

    def close(self) -> None:
        for hook in (*self._modules, *self._hooks.values()):
            hook.remove()

    def _watch_gathered(self, path: str, module: nn.Module, inputs: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            self._watch(parameter, f"{path}.{name}".lstrip("."))

    def _watch(self, parameter: nn.Parameter, name: str) -> None:
        if parameter.requires_grad and parameter not in self._hooks:
            self._hooks[parameter] = parameter.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        total = self._sums.get(name)
        own = checksum(gradient)
        self._sums[name] = own if total is None else total * _FACTOR + own


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements, as integers of their bits, modulo 2^64.

    One changed element changes it; changes of several may cancel out.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)
