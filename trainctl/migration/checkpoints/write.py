"""Import of a foreign checkpoint: a run whose first checkpoint has the tensors of a `Source`.

Tensors are copied a piece at a time, so no parameter is ever whole in memory here. The checkpoint
is committed as a training run commits its own; nothing is left of an import that fails.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainctl import __version__
from trainctl.config.schema import RunConfig
from trainctl.engines.process import Process, joined_process
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.migration.checkpoints.source import FORMATS, Source, differences, match_names, reading
from trainctl.migration.checkpoints.unpickle import as_numbers, damaged
from trainctl.models.hf_weights import persistent_buffers, tied_names
from trainctl.options.adapter import low_rank
from trainctl.options.optimizer import spec_of
from trainctl.plans.identity import check_shapes, model_description
from trainctl.plans.mup import multipliers
from trainctl.plans.settings import number_formats
from trainctl.plans.trainable import trainable
from trainctl.plans.types import RunPlan
from trainctl.runs import checkpoints
from trainctl.runs.directory import (
    create_run,
    is_run,
    last_attempt,
    new_attempt,
    open_run,
    remove_run,
)
from trainctl.runs.files import make_folder
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.manifest import FORMAT, write_manifest
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.checkpoint.content import write_stream
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.checkpoint.save import check_space
from trainctl.train.models.frozen_base import FullModel, initial_base, manifest_entries
from trainctl.train.models.model import TORCH_TYPES, skeleton
from trainctl.untrusted import is_count, is_finite

PIECE = 1 << 24
"""Elements that are copied at a time: 64 MiB in fp32."""

FILE_BYTES = 4 * 2**30
"""Size from which the next parameter begins a new file; ranks verify files in shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCheckpoint:
    """Result of an import."""

    run: str
    """The run's directory."""
    checkpoint: str
    """Name of the checkpoint's folder."""
    format: str
    """Name of the source's format."""
    step: int
    samples: int
    tokens: int
    states: list[str]
    num_parameters: int
    size_bytes: int
    """Bytes of all tensors."""
    notes: list[str]
    """Remarks: what is unknown, was not carried over, or differs from the configuration."""
    unchecked: list[str]
    """Properties of the source's files that cannot be checked."""


def import_source(
    source: Source,
    plan: RunPlan,
    run_dir: Path,
    *,
    argv: Sequence[str] = (),
    progress: OnUnits = ignore_progress,
) -> ImportedCheckpoint:
    """Write a source as the first checkpoint of a run, which is made unless it is there.

    Raises:
        TrainctlError: The source is of another model or optimizer, or it is damaged (exit code 5);
            the run has checkpoints already. Nothing is left behind.
    """
    model = skeleton(plan.config.model, TORCH_TYPES[number_formats(plan.config.precision).weights])
    whole = FullModel.of(plan.config.model, model)
    names, frozen = _matched_names(source, plan, whole)
    states = _carried_states(source, plan)
    _check_facts(source)
    facts, notes = _facts(source, plan)
    was_there = is_run(run_dir)
    run = open_run(run_dir) if was_there else create_run(plan.config, run_dir=run_dir, argv=argv)
    try:
        with hold_lock(run):
            _require_no_checkpoint(run, plan)
            if frozen:
                facts |= _base_entries(source, frozen, plan.config, whole, run)
            total = _write(source, run, names, states, facts, plan, progress)
            if not last_attempt(run):
                new_attempt(run, plan)  # export and evaluate read the plan there
    except BaseException:
        if not was_there:
            remove_run(run)
        raise
    return ImportedCheckpoint(
        run=str(run.root),
        checkpoint=checkpoints.checkpoint_name(facts["step"]),
        format=source.format,
        step=facts["step"],
        samples=facts["samples"],
        tokens=facts["tokens"],
        states=list(states),
        num_parameters=sum(math.prod(source.shapes[name]) for name in names.values()),
        size_bytes=total,
        notes=notes,
        unchecked=list(source.unchecked),
    )


def _require_no_checkpoint(run: RunPaths, plan: RunPlan) -> None:
    """Refuse a run with checkpoints; one whose import was killed at its end is completed.

    Raises:
        TrainctlError: It has some (exit code 5).
    """
    if not checkpoints.checkpoint_folders(run):
        return
    whole, _ = checkpoints.newest_checkpoint(run)
    if whole is not None and not last_attempt(run):
        new_attempt(run, plan)
    raise RunStateError(
        f"{run.root} has checkpoints already"
        + ("" if whole is None else f", and {whole.path.name} is whole"),
        hint=f"trainctl resume {run.root} continues it; import another checkpoint into a new "
        "directory",
    )


def _matched_names(
    source: Source, plan: RunPlan, whole: FullModel
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the source's name of each trained and of each frozen parameter of the planned model.

    Raises:
        TrainctlError: Tensors are missing, left over or of another shape, the source did not train
            what this run would, or the model has a buffer that would be lost.
    """
    if low_rank(plan.config.adapter) is not None:
        raise TrainctlError(
            "a checkpoint cannot be imported into a run with an adapter",
            hint="take its weights into a new run: model.initial_weights",
        )
    kept = persistent_buffers(whole.skeleton)
    if kept:
        raise RunStateError(
            f"the model has a buffer that training keeps, {kept[0].name}, and no import reads it",
            hint="export the weights with the other trainer, and start a run from that directory: "
            "model.path=DIR",
        )
    shapes = dict(whole.shapes)
    with _reading(source):
        source.use_model(whole.skeleton)
        names, copies = match_names(source, shapes, tied_names(whole.skeleton))
    found = {name: list(source.shapes[there]) for name, there in names.items()}
    used = {*names.values(), *copies}
    found |= {name: list(shape) for name, shape in source.shapes.items() if name not in used}
    where = f"{source.path} ({source.format})"
    try:
        check_shapes(where, {"shapes": found}, shapes)
    except TrainctlError as error:
        hint = "configure the source's model: recipe=..., model.KEY=VALUE, or model.path=DIR"
        raise TrainctlError(error.message, hint=hint, exit_code=error.exit_code) from None
    trains = {tensor.name for tensor in trainable(plan.config).trained}
    trained = {name: there for name, there in names.items() if name in trains}
    untrained = sorted(source.untrained.intersection(trained.values()))
    if untrained:
        more = f" and {len(untrained) - 1} more" if len(untrained) > 1 else ""
        raise RunStateError(
            f"{where} did not train {untrained[0]}{more}, and this run would",
            hint="training.freeze keeps them as they are; or take the weights alone, into a new "
            "run: model.initial_weights",
        )
    return trained, {name: there for name, there in names.items() if name not in trains}


def _base_entries(
    source: Source, frozen: Mapping[str, str], config: RunConfig, whole: FullModel, run: RunPaths
) -> dict[str, Any]:
    """Return the manifest's entries on the frozen weights, which checkpoints do not hold.

    Raises:
        TrainctlError: The source has other frozen weights than the run starts from (exit code 5).
    """
    with _single_process() as process:
        base = initial_base(whole, config, run, process)
    for name, there in frozen.items():
        shape = torch.Size(whole.shapes[name])
        for start in range(0, shape.numel(), PIECE):
            end = min(start + PIECE, shape.numel())
            here = base.source.read(name, shape, start, end)
            values = _read_piece(source, there, MASTER, start, end)
            # The source may hold them in its compute format.
            if not any(torch.equal(values, here.to(kind).float()) for kind in TORCH_TYPES.values()):
                raise RunStateError(
                    f"{source.path}: {there} is frozen in this run, and it is not what "
                    f"{config.model.initial_weights or 'training.seed'} gives",
                    hint="model.initial_weights=DIR, the weights that the source started from",
                )
    return manifest_entries(config, base)


@contextmanager
def _single_process() -> Iterator[Process]:
    """Make this process the only rank of a group, for functions that ranks call together."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield joined_process(torch.device("cpu"), timedelta(minutes=1))
    finally:
        dist.destroy_process_group()


def _carried_states(source: Source, plan: RunPlan) -> tuple[str, ...]:
    """Return the states to write.

    Raises:
        TrainctlError: The source has the states of another optimizer (exit code 5).
    """
    section = plan.config.optimizer
    wanted = set(spec_of(section).states_of(section, is_matrix=False))
    had = set(source.states) - {MASTER}
    if had and wanted != had:
        raise RunStateError(
            f"{source.path} has the optimizer states {', '.join(sorted(had))}; "
            f"optimizer={section.kind} has {', '.join(sorted(wanted)) or 'none'}",
            hint="choose the optimizer that the source trained with",
        )
    if not had:
        source.notes.append("the source has no optimizer states: they begin at zero")
    return (MASTER, *sorted(had))


def _reading(source: Source) -> AbstractContextManager[None]:
    """Make whatever a source raises an error of its checkpoint (exit code 5)."""
    return reading(source.path, FORMATS[source.format].described)


def _check_facts(source: Source) -> None:
    """Refuse counters and settings that no training has.

    Raises:
        TrainctlError: One is no number, negative, infinite, or too large (exit code 5).
    """
    known = source.progress
    for name in ("step", "samples", "tokens"):
        value = getattr(known, name)
        if value is not None and not is_count(value):
            raise damaged(source.path, f"its number of {name} is {value!r:.40}")
    settings = {**source.scalars, **source.hyperparameters, **source.loss_scale}
    if known.learning_rate is not None:
        settings["learning rate"] = known.learning_rate
    for name, value in settings.items():
        if not is_finite(value) or (name == "step" and not is_count(int(value))):
            raise damaged(source.path, f"its {name} is {value!r:.40}")


def _read_piece(source: Source, name: str, state: str, start: int, end: int) -> torch.Tensor:
    """Return elements of a source's tensor in fp32.

    Raises:
        TrainctlError: There are not so many, or they are no finite numbers (exit code 5).
    """
    with _reading(source):
        values = source.read(name, state, start, end)
        if values.numel() != end - start:
            raise damaged(source.path, f"{name} ({state}) has not all of its elements")
        return as_numbers(values, source.path, f"{name} ({state})")


def _facts(source: Source, plan: RunPlan) -> tuple[dict[str, Any], list[str]]:
    """Return step, samples, tokens and scalars for the manifest, and all notes.

    Raises:
        TrainctlError: The source does not know its step.
    """
    known, notes = source.progress, list(source.notes)
    step = known.step if known.step is not None else source.scalars.get("step")
    if step is None:
        raise TrainctlError(f"{source.path} does not say at which step it was saved")
    step = int(step)
    scalars = dict(source.scalars) if len(source.states) > 1 else {}
    if "exp_avg" in source.states and "step" not in scalars:
        scalars["step"] = float(step)
        notes.append(f"the optimizer's own step count is unknown: it continues at {step:,}")
    samples, tokens = known.samples, known.tokens
    if samples is None:
        samples = plan.batches.samples_before(step)
        notes.append(
            f"samples trained on are unknown: {samples:,} is what {step:,} steps of this "
            "configuration have"
        )
    if tokens is None:
        length = plan.config.training.sequence_length
        tokens = samples * length
        notes.append(
            f"tokens trained on are unknown: {tokens:,} is {samples:,} samples of {length:,}"
        )
    notes.append(
        f"the data continues at sample {samples:,} of this run's own order; which samples the "
        "source has seen is not known"
    )
    notes += differences(source, plan, step, samples)
    return {"step": step, "samples": samples, "tokens": tokens, "scalars": scalars}, notes


def _write(
    source: Source,
    run: RunPaths,
    names: Mapping[str, str],
    states: Sequence[str],
    facts: Mapping[str, Any],
    plan: RunPlan,
    progress: OnUnits,
) -> int:
    """Write and commit the checkpoint; return the bytes of its tensors.

    Raises:
        TrainctlError: The source is damaged, or the disk is full (exit code 4).
    """
    step: int = facts["step"]
    folder = checkpoints.temporary_path(run, step)
    shapes = {name: list(source.shapes[there]) for name, there in names.items()}
    numel = sum(math.prod(shape) for shape in shapes.values())
    total = numel * len(states) * torch.float32.itemsize
    try:
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        check_space(folder, total)
        files, fragments = _write_files(source, folder, names, states, lambda n: progress(n, total))
        source.verify()
        write_manifest(
            folder,
            {
                **facts,
                "format": FORMAT,
                "trainctl": __version__,
                "run": checkpoints.manifest_run_id(run) or "",
                "attempt": 0,
                "model": model_description(plan.config.model, shapes),
                "multipliers": multipliers(plan.config.model),
                "weights_only": False,
                "kept_for": "",
                "metrics": {},
                "layout": {},
                "loss_scale": dict(source.loss_scale),
                "corpus_digest": "",
                "imported": {"format": source.format, "path": str(source.path.resolve())},
                "shapes": shapes,
                "states": list(states),
                "files": files,
                "fragments": fragments,
            },
        )
        checkpoints.commit_checkpoint(run, step)
    except OSError as error:
        raise MachineError(
            f"the checkpoint could not be written: {error}",
            hint="free space, and import again",
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(total)


def _write_files(
    source: Source,
    folder: Path,
    names: Mapping[str, str],
    states: Sequence[str],
    progress: Callable[[int], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write all tensors; return the manifest's entries of files and fragments.

    Each parameter is an optimizer tensor of its own, and states of one parameter follow each other.
    """
    done = 0

    def pieces(listed: Sequence[str]) -> Iterator[torch.Tensor]:
        nonlocal done
        for name in listed:
            numel = math.prod(source.shapes[names[name]])
            for state in states:
                for start in range(0, numel, PIECE):
                    end = min(start + PIECE, numel)
                    values = _read_piece(source, names[name], state, start, end)
                    yield values
                    done += values.numel() * torch.float32.itemsize
                    progress(done)

    files: list[dict[str, Any]] = []
    fragments: list[dict[str, Any]] = []
    for listed in _split_into_files(source, names, len(states)):
        file = f"imported-{len(files):05d}.safetensors"
        numels = [math.prod(source.shapes[names[name]]) for name in listed]
        layout = {
            f"{state}/{index}": (torch.float32, (numel,))
            for index, numel in enumerate(numels)
            for state in states
        }
        size, digest = write_stream(folder / file, layout, _read_ahead(pieces(listed)))
        files.append({"name": file, "bytes": size, "sha256": digest})
        fragments += [
            {
                "parameter": name,
                "start": 0,
                "numel": numel,
                "file": file,
                "tensor": index,
                "offset": 0,
            }
            for index, (name, numel) in enumerate(zip(listed, numels, strict=True))
        ]
    return files, fragments


def _read_ahead(pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the pieces, of which a thread reads the next one while the last is written."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, pieces, None)
            yield piece


def _split_into_files(
    source: Source, names: Mapping[str, str], num_states: int
) -> Iterator[list[str]]:
    listed: list[str] = []
    size = 0
    for name, there in names.items():
        listed.append(name)
        size += math.prod(source.shapes[there]) * num_states * torch.float32.itemsize
        if size >= FILE_BYTES:
            yield listed
            listed, size = [], 0
    if listed:
        yield listed
