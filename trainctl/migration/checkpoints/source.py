"""The `Source` protocol: a checkpoint of another trainer, opened for streaming; and its formats.

Differences between the source's training and the configuration are told in words.

Names of a source's parameters are matched with those of the planned model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import RunStateError, TrainctlError
from trainctl.plans.schedule import Curve
from trainctl.plans.types import RunPlan

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProgress:
    """Progress of the training that a source was saved in; None where it does not know."""

    step: int | None = None
    """Optimizer steps done."""
    samples: int | None = None
    """Sequences trained on."""
    tokens: int | None = None
    """Tokens trained on."""
    learning_rate: float | None = None
    """Learning rate of the next update, of the first parameter group."""


class Source(ABC):
    """A checkpoint of another trainer, whose tensors are read by ranges.

    A reader sets what it knows. Names are those of the parameters in the model of transformers, as
    far as the source tells: the writer strips the prefixes of wrappers.

    Attributes:
        format: Name of the format, a key of `FORMATS`.
        path: Directory that the files are in.
        shapes: Shape of each whole parameter, by name.
        states: Names of the states that `read` returns, as trainctl names them: `master`, and those
            of the optimizer (`exp_avg`, `exp_avg_sq`); `master` alone if it has no others.
        scalars: States that are one number for the whole optimizer, such as `step`.
        progress: Step, samples, tokens, learning rate.
        hyperparameters: Hyperparameters of the optimizer in the checkpoint, by the keys of
            trainctl's `optimizer` section (`betas` as `beta1` and `beta2`).
        loss_scale: State of a dynamic loss scale (`cur_scale`, `cur_iter`, `last_overflow_iter`,
            `cur_hysteresis`).
        untrained: Parameters that the source did not train: they have `master` alone.
        notes: Remarks on what is unknown or not carried over.
        unchecked: What cannot be checked about the files, each as a clause that begins with "that".
    """

    format: str
    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    states: tuple[str, ...] = ("master",)
    scalars: Mapping[str, float] = NOTHING
    progress: SourceProgress = SourceProgress()
    hyperparameters: Mapping[str, float] = NOTHING
    loss_scale: Mapping[str, float] = NOTHING
    untrained: frozenset[str] = frozenset()
    notes: list[str]
    unchecked: Sequence[str] = ()

    def use_model(self, model: PreTrainedModel) -> None:  # noqa: B027
        """Take the model, without values, that the tensors are for; called before any `read`.

        A source whose files need the model to be understood sets `shapes` here once more.

        Raises:
            TrainctlError: The files do not match the model.
        """

    @abstractmethod
    def read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a state of a whole, flattened parameter.

        At most two of the largest tensors may be in memory at a time. Ranges of a parameter are
        read in order.

        Raises:
            TrainctlError: A file is damaged; names it.
        """

    def verify(self) -> None:  # noqa: B027
        """Check the bytes that were read against the source's own checksums, if it has any.

        Called once, after the last `read` and before anything is committed.

        Raises:
            TrainctlError: A file is damaged; names it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of checkpoints, and the module that reads it.

    The module has `is_here(directory: Path) -> bool`, which looks at names of files and little
    else, and `open_source(directory: Path) -> Source`.
    """

    described: str
    """Description for messages."""
    module: str


FORMATS: Mapping[str, Format] = {
    "trainer": Format(
        described="checkpoint of transformers' Trainer or of accelerate (optimizer.pt)",
        module="trainctl.migration.checkpoints.trainer",
    ),
    "universal": Format(
        described="DeepSpeed universal checkpoint (zero/NAME/fp32.pt)",
        module="trainctl.migration.checkpoints.to_universal",
    ),
    "deepspeed": Format(
        described="DeepSpeed checkpoint (*_model_states.pt, *_optim_states.pt)",
        module="trainctl.migration.checkpoints.deepspeed",
    ),
    "megatron": Format(
        described="Megatron-LM checkpoint (--ckpt-format torch_dist)",
        module="trainctl.migration.checkpoints.megatron",
    ),
    "dcp": Format(
        described="torch's distributed checkpoint, also torchtitan's (.metadata)",
        module="trainctl.migration.checkpoints.dcp",
    ),
}
"""Formats by name, in the order in which `detect` looks for them."""


def detect(directory: Path) -> str:
    """Return the name of the format of a checkpoint, by its content.

    Raises:
        TrainctlError: The directory does not exist, or no format is recognised.
    """
    if not directory.is_dir():
        raise TrainctlError(f"{directory} is no directory")
    for name, each in FORMATS.items():
        if import_module(each.module).is_here(directory):
            return name
    known = "; ".join(f"{name}: {each.described}" for name, each in FORMATS.items())
    raise TrainctlError(f"no checkpoint is recognised in {directory}", hint=f"known: {known}")


def open_source(directory: Path, format: str | None = None) -> Source:
    """Open a checkpoint of another trainer.

    Args:
        directory: The directory that its trainer was told to save in, or that of one step.
        format: Name of its format; None detects it.

    Raises:
        TrainctlError: There is no such format, or it is not in the directory; or the checkpoint is
            damaged or incomplete (exit code 5), which names the file.
    """
    if format is not None and format not in FORMATS:
        raise TrainctlError(
            f"--from {format} is none of {', '.join(FORMATS)}",
            hint=did_you_mean(nearest_names(format, FORMATS)),
        )
    name = detect(directory) if format is None else format
    module = import_module(FORMATS[name].module)
    if format is not None and not (directory.is_dir() and module.is_here(directory)):
        raise TrainctlError(f"{directory} holds no {FORMATS[name].described}")
    with reading(directory, FORMATS[name].described):
        source: Source = module.open_source(directory)
    return source


@contextmanager
def reading(directory: Path, described: str) -> Iterator[None]:
    """Make whatever foreign content raises an error of the checkpoint (exit code 5).

    Args:
        described: Description of the format.

    Raises:
        TrainctlError: The content raised something.
    """
    try:
        yield
    except TrainctlError:
        raise
    except Exception as error:  # damaged content can raise anything
        what = f"{type(error).__name__}: {error}"
        raise RunStateError(
            f"{directory} is no {described} that can be read ({what:.300})",
            hint="it is damaged, or of a version that is not known",
        ) from error


_TOLERANCE = 1e-6
"""Relative difference of two numbers that are the same: one may have been rounded to fp32."""


def differences(source: Source, plan: RunPlan, step: int, samples: int) -> list[str]:
    """Return the differences between a source's training and the plan, each with both values.

    Args:
        step: Optimizer steps done.
    """
    return [
        *_optimizer_differences(source, plan),
        *_rate_difference(source, plan, step),
        *_progress_differences(plan, step, samples),
    ]


def _optimizer_differences(source: Source, plan: RunPlan) -> Iterator[str]:
    section = plan.config.optimizer
    known = {field.name for field in fields(section)}
    for key, there in source.hyperparameters.items():
        if key not in known or key == "lr":
            continue
        here: float = getattr(section, key)
        if _differs(there, here):
            yield f"optimizer.{key}={here:g}, and the source trained with {there:g}"


def _rate_difference(source: Source, plan: RunPlan, step: int) -> Iterator[str]:
    there = source.progress.learning_rate
    if there is None:
        yield "the source's learning rate is unknown: the schedule of the configuration applies"
        return
    here = plan.peak_lr * Curve.of(plan).factor(step)
    if _differs(there, here):
        yield (
            f"the learning rate of step {step + 1:,} is {here:.6g} by this configuration's "
            f"schedule; the source was at {there:.6g}"
        )


def _progress_differences(plan: RunPlan, step: int, samples: int) -> Iterator[str]:
    planned = plan.batches.samples_before(step)
    if samples != planned:
        yield (
            f"the source has trained on {samples:,} samples in {step:,} steps; this "
            f"configuration's batches have {planned:,}"
        )
    if step >= plan.total_steps:
        yield (
            f"the source is at step {step:,}, and this configuration ends after "
            f"{plan.total_steps:,}: a larger training.steps trains on"
        )


def _differs(there: float, here: float) -> bool:
    return abs(there - here) > _TOLERANCE * max(abs(there), abs(here))


_WRAPPERS = re.compile(r"(^|(?<=\.))(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
"""Parts of names that wrappers of torch add: FSDP, `torch.compile`, activation checkpointing."""

_PIECE = 1 << 24
"""Elements of two tied weights that are compared at a time."""


def match_names(
    source: Source, shapes: Mapping[str, Sequence[int]], tied: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], set[str]]:
    """Return the source's name of each of the model's parameters that it has, in their order; and
    the source's further tensors of tied weights, which are equal.

    Parts that wrappers add anywhere are ignored, as is one prefix that all names of the source
    have in common (`module.`, or the attribute of a class around the model).

    Args:
        shapes: Shapes of the model's parameters, by canonical name.
        tied: Further names of the model's tied weights, by canonical name.

    Raises:
        TrainctlError: Two tensors of the source would be one tied weight, and they differ.
    """
    plain = {without_wrappers(name): name for name in source.shapes}
    prefix = common_prefix(plain, shapes)
    found = {name.removeprefix(prefix): there for name, there in plain.items()}
    matched: dict[str, str] = {}
    copies: set[str] = set()
    for name in shapes:
        under = [found[each] for each in (name, *tied.get(name, ())) if each in found]
        if not under:
            continue
        matched[name] = under[0]
        for other in under[1:]:
            _check_tied(source, name, under[0], other)
            copies.add(other)
    return matched, copies


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the parts that wrappers of torch add."""
    return _WRAPPERS.sub("", name)


def common_prefix(names: Collection[str], wanted: Mapping[str, Sequence[int]]) -> str:
    """Return the prefix without which most of the wanted names are found; often empty."""
    first = next(iter(wanted), "")
    candidates = {name.removesuffix(first) for name in names if name.endswith(first)} | {""}
    return max(
        sorted(candidates, key=len),
        key=lambda prefix: sum(prefix + name in names for name in wanted),
    )


def order_by_shape(
    shapes: Mapping[str, Sequence[int]], optimizer: Mapping[str, Any], path: Path
) -> dict[str, int]:
    """Return the number of each parameter in the `state_dict` of an optimizer of torch.

    It has no names: numbers follow the parameter groups, and within a group the model's order. With
    several groups, the shapes of the states tell which parameters are in which group.

    Args:
        shapes: Shapes of the parameters in the model's order, each tied weight once.
        optimizer: The `state_dict`, with `LazyTensor`s.
        path: File to name in errors.

    Raises:
        TrainctlError: The numbers of the parameters do not follow from it.
    """
    queues = [list(group["params"]) for group in optimizer["param_groups"]]
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        fitting = [queue for queue in queues if queue and _has_shape(optimizer, queue[0], shape)]
        if len(fitting) != 1:
            break
        found[name] = fitting[0].pop(0)
    if len(found) < len(shapes) or any(queues):
        raise RunStateError(
            f"{path}: which of the optimizer's states belong to which parameters does not follow "
            "from their shapes, and their names are not saved",
            hint="save with one parameter group, or with ZeRO 1, which saves the names",
        )
    return found


def _has_shape(optimizer: Mapping[str, Any], number: int, shape: Sequence[int]) -> bool:
    """Return True if a parameter's states have the shape; also if it has none."""
    states = optimizer["state"].get(number, {}).values()
    shaped = [tuple(each.shape) for each in states if getattr(each, "shape", ())]
    return all(each == tuple(shape) for each in shaped)


def _check_tied(source: Source, name: str, first: str, other: str) -> None:
    """Refuse two tensors that the model ties, unless they are equal.

    Raises:
        TrainctlError: They differ (exit code 5).
    """
    numel = torch.Size(source.shapes[first]).numel()
    same = source.shapes[first] == source.shapes[other]
    for start in range(0, numel, _PIECE) if same else ():
        end = min(start + _PIECE, numel)
        here, there = (source.read(each, "master", start, end) for each in (first, other))
        same = same and torch.equal(here, there)
    if not same:
        raise RunStateError(
            f"{source.path}: {first} and {other} differ, and the model has one weight for both "
            f"({name})",
            hint="model.tie_word_embeddings=false",
        )
