"""Export of a checkpoint as one of transformers' Trainer, which resumes from it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR
from torch.serialization import skip_data
from transformers.trainer_callback import TrainerState

from trainctl.config.schema import RunConfig
from trainctl.migration.checkpoints.to_torch import ExportedRun
from trainctl.migration.checkpoints.trainer import OPTIMIZERS, STATE, trainer_groups
from trainctl.plans.optimizers import parameter_groups
from trainctl.runs.files import write_json
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.export.directory import export
from trainctl.train.export.output import ExportedCheckpoint, new_folder

SCHEDULER = "scheduler.pt"


def export_trainer(
    config: RunConfig, checkpoint: Path, out: Path, *, progress: OnUnits = ignore_progress
) -> ExportedCheckpoint:
    """Write a folder that `Trainer.train(resume_from_checkpoint=...)` continues from.

    Weights and states are in fp32. The learning rate goes on by the Trainer's own schedule, from
    this step.

    Raises:
        TrainctlError: See `ExportedRun.open`; or the folder cannot be written.
    """
    run = ExportedRun.open(config, checkpoint, "trainer")
    weights = run.num_bytes // (1 + len(run.states))
    decayed, others = trainer_groups(run.model)
    groups = [(decayed, config.optimizer.weight_decay), (others, 0.0)]
    _note_other_groups(config, run, groups)
    optimizer = run.optimizer([(names, {"weight_decay": decay}) for names, decay in groups])
    with new_folder(out, run.num_bytes) as folder:
        model = folder / "model"
        exported = export(
            config,
            checkpoint,
            model,
            dtype=torch.float32,
            progress=lambda done, total: progress(done, run.num_bytes),
        )
        for file in model.iterdir():
            file.rename(folder / file.name)
        model.rmdir()
        _write_optimizer(
            folder / OPTIMIZERS[0],
            run,
            [*decayed, *others],
            optimizer.state_dict()["param_groups"],
            lambda done: progress(weights + done, run.num_bytes),
        )
        torch.save(_scheduler(run, optimizer), folder / SCHEDULER)
        write_json(folder / STATE, _state(run))
    run.notes += exported.notes
    return run.result(out)


def _note_other_groups(
    config: RunConfig, run: ExportedRun, groups: Sequence[tuple[Sequence[str], float]]
) -> None:
    """Note parameters whose settings the Trainer's groups, with their decay, do not have."""
    own = {name: group for group in parameter_groups(config) for name in group.parameters}
    others = [
        name
        for names, decay in groups
        for name in names
        if own[name].weight_decay != decay or own[name].lr_factor != 1
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        run.notes.append(
            f"{others[0]}{more} will have the weight decay and the learning rate of the Trainer's "
            "own two groups: with decay, and without (norms and biases)"
        )


def _write_optimizer(
    path: Path,
    run: ExportedRun,
    names: Sequence[str],
    groups: list[dict[str, Any]],
    progress: Callable[[int], None],
) -> None:
    """Write a file of `torch.save` with the optimizer's state dict, one tensor at a time.

    torch pickles the state dict of tensors without values into a sparse file, whose pickle is
    taken; the tensors are written after it in the order in which the pickle refers to them.
    """
    with FakeTensorMode():
        state = {
            index: {
                **{name: torch.empty(()) for name in run.scalars()},
                **{name: torch.empty(run.shapes[parameter]) for name in run.states},
            }
            for index, parameter in enumerate(names)
        }
    sparse = path.with_suffix(".tmp")
    with skip_data(materialize_fake_tensors=True):
        torch.save({"state": state, "param_groups": groups}, sparse)
    tensors = chain.from_iterable(
        chain(run.scalars().values(), (run.read(parameter, each) for each in run.states))
        for parameter in names
    )
    done = 0
    # torch reads entries of any alignment, unless it is told to map the file.
    with zipfile.ZipFile(sparse) as archive, zipfile.ZipFile(path, "w") as written:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            if not name.startswith("data/"):
                written.writestr(entry.filename, archive.read(entry))
        for index, tensor in enumerate(tensors):
            with written.open(f"{folder}/data/{index}", "w", force_zip64=True) as stream:
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy())
            done += tensor.nbytes
            progress(done)
            del tensor  # before the next one is read
    sparse.unlink()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _scheduler(run: ExportedRun, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of a scheduler of torch at this step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    state: dict[str, Any] = LambdaLR(optimizer, lambda step: 1.0).state_dict()
    return state | {"last_epoch": run.step, "_step_count": run.step + 1, "_last_lr": rates}


def _state(run: ExportedRun) -> dict[str, Any]:
    """Return the Trainer's record of its progress, from which it also takes intervals of steps."""
    plan = run.plan
    every = {
        "logging_steps": 1,
        "eval_steps": plan.config.training.evaluate_every_steps,
        "save_steps": plan.config.checkpoint.every_steps,
    }
    state = TrainerState(
        epoch=0.0,
        global_step=run.step,
        max_steps=plan.total_steps,
        num_input_tokens_seen=run.saved.manifest["tokens"],
        train_batch_size=plan.batch.micro_batch_size,
        **{name: steps for name, steps in every.items() if steps is not None},
    )
    run.notes.append(
        f"the Trainer goes on with logging_steps={state.logging_steps}, eval_steps="
        f"{state.eval_steps} and save_steps={state.save_steps}, which it takes from {STATE}"
    )
    return asdict(state)
