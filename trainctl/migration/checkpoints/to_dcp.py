"""Export of a checkpoint for torch's distributed checkpoints: `dcp.load` on any layout reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from trainctl.config.schema import RunConfig
from trainctl.migration.checkpoints.to_torch import ExportedRun, Progress
from trainctl.models.hf_weights import tied_names
from trainctl.plans.optimizers import parameter_groups
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.export.output import ExportedCheckpoint, new_folder


def export_dcp(
    config: RunConfig, checkpoint: Path, out: Path, *, progress: Progress = lambda done, total: None
) -> ExportedCheckpoint:
    """Write weights and optimizer states to a new folder, by torch's own writer.

    The keys are those of `{"model": ..., "optimizer": ...}` with the state dicts of
    `torch.distributed.checkpoint.state_dict`. The optimizer's settings are there by group and,
    for `flatten_optimizer_state_dict`, by parameter. `trainer` has the step, samples and tokens.

    Raises:
        TrainctlError: See `ExportedRun.open`; or the folder cannot be written.
    """
    run = ExportedRun.open(config, checkpoint, "dcp")
    optimizer, planner = _optimizer_state(config, run), _Planner(run, progress)
    content: dict[str, Any] = {
        "model": {name: torch.empty(shape, device="meta") for name, shape in run.shapes.items()},
        "optimizer": optimizer,
        "trainer": {name: run.saved.manifest[name] for name in ("step", "samples", "tokens")},
    }
    for group in optimizer["param_groups"]:
        for key, value in group.items():
            if key != "params":
                for name in group["params"]:
                    content[f"optimizer.param_groups.{name}.{key}"] = value
    with new_folder(out, run.num_bytes) as folder:
        writer = _Writer(folder, tied_names(run.model))
        dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    return run.result(out)


def _optimizer_state(config: RunConfig, run: ExportedRun) -> dict[str, Any]:
    """Return the optimizer's state dict by names, with tensors without values."""
    groups = [
        (
            group.parameters,
            {"weight_decay": group.weight_decay, "lr_factor": group.lr_factor},
        )
        for group in parameter_groups(config)
    ]
    saved = run.optimizer(groups).state_dict()["param_groups"]
    for (names, _), group in zip(groups, saved, strict=True):
        group["params"] = list(names)
    state = {
        name: {
            **run.scalars(),
            **{state: torch.empty(shape, device="meta") for state in run.states},
        }
        for name, shape in run.shapes.items()
    }
    return {"state": state, "param_groups": saved}


class _Planner(DefaultSavePlanner):  # type: ignore[misc]
    """Planner that reads each tensor from the checkpoint when it is written.

    torch's writer keeps all tensors of a file until it is complete. So the values of each are freed
    when the next is asked for: a writer without threads has written it by then.
    """

    def __init__(self, run: ExportedRun, progress: Progress) -> None:
        super().__init__()
        self._run, self._progress, self._done = run, progress, 0
        self._written = torch.empty(0)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, torch.Tensor) or not found.is_meta:
            return found
        name, state = index.fqn.removeprefix("model."), MASTER
        if index.fqn.startswith("optimizer.state."):
            name, _, state = index.fqn.removeprefix("optimizer.state.").rpartition(".")
        self._done += found.nbytes
        self._progress(self._done, self._run.num_bytes)
        self._written.untyped_storage().resize_(0)
        self._written = self._run.read(name, state)
        return self._written


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    """Writer whose metadata lists a tied weight under all its names, though it is stored once."""

    def __init__(self, folder: Path, tied: Mapping[str, Sequence[str]]) -> None:
        super().__init__(folder, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self._tied = {f"model.{name}": others for name, others in tied.items()}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for listed in results for result in listed]
        for result in written:
            for other in self._tied.get(result.index.fqn, ()):
                key, index = f"model.{other}", result.index
                metadata.state_dict_metadata[key] = metadata.state_dict_metadata[index.fqn]
                metadata.planner_data[key] = ("model", other)
                alias = MetadataIndex(key, index.offset, index.index)
                results[0].append(replace(result, index=alias))
        super().finish(metadata, results)
