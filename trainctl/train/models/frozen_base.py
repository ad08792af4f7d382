"""Weights that do not train: where they came from, and that they are what they were.

A checkpoint of a run with frozen weights holds those that train, and says in its manifest what they
stand on (`base`): a seed, with a digest of how the others are drawn by it; a directory of
safetensors, by the SHA-256 of each of its files; or another run's checkpoint, by that of its
manifest, which has those of its files. A file is read for its digest once a run, each rank its
share; what that was is kept with the run, beside size and time of the file, and only a file of
another size or time is read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.safetensors_files import stored_tensors
from trainctl.config.schema import AdapterConfig, ModelConfig, RunConfig
from trainctl.engines.process import Process
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.plan.identity import OF_LONGER_CONTEXT, check_model, check_shapes
from trainctl.plan.trainable import adapted_layers, added_tensors, also_trained, is_partial
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import digest
from trainctl.train.adapters.layers import Merged
from trainctl.train.adapters.quantized import dequantized
from trainctl.train.checkpoint.content import Checkpoint
from trainctl.train.checkpoint.restore import weights_of
from trainctl.train.models.weights import SafetensorsWeights, SeedWeights, WeightSource

Shapes = Mapping[str, list[int]]


@dataclass(frozen=True, slots=True)
class Base:
    """What the weights that train stand on."""

    source: WeightSource
    """All of the model's own weights, as they are at step 0."""
    facts: dict[str, Any]
    """What the manifest of each checkpoint says of it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A model whose weights are read: all of its tensors, none cut, without an adapter."""

    config: ModelConfig
    skeleton: PreTrainedModel
    shapes: Shapes
    """Sizes of its parameters, by canonical name."""

    @classmethod
    def of(cls, config: ModelConfig, skeleton: PreTrainedModel) -> Whole:
        """Of a whole skeleton."""
        shapes = {name: list(each.shape) for name, each in skeleton.named_parameters()}
        return cls(config, skeleton, shapes)


class Layered:
    """Some tensors from one source, all others from another.

    Args:
        own: Of the tensors that are named, and of buffers that it has.
        names: Their canonical names.
        base: Of the rest.
    """

    def __init__(self, own: WeightSource, names: Collection[str], base: WeightSource) -> None:
        self._own, self._names, self._base = own, frozenset(names), base

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a parameter."""
        source = self._own if name in self._names else self._base
        return source.read(name, shape, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a persistent buffer."""
        values = self._own.buffer(name)
        return self._base.buffer(name) if values is None else values


def initial_base(whole: Whole, config: RunConfig, run: RunPaths, process: Process) -> Base:
    """What a run starts from, with its digest where some of it is never saved; on all ranks.

    Raises:
        TrainctlError: There are no such weights, or they are another model's.
    """
    model, seed = whole.config, config.training.seed
    if model.initial_weights is None:
        drawn = SeedWeights.of(model, whole.skeleton, seed)
        return Base(drawn, {"kind": "seed", "seed": seed, "sha256": drawn.laws_digest})
    folder = Path(model.initial_weights).expanduser()
    checkpoint = weights_of(folder, process)
    if checkpoint is not None:
        facts: dict[str, Any] = {"kind": "checkpoint", "path": str(checkpoint.path.resolve())}
        facts["sha256"] = digest(checkpoint.manifest)
        if is_partial(config) and process.is_first:
            _keep(run.base, checkpoint)
        return Base(whole_weights(checkpoint, whole, process=process, is_start=True), facts)
    source = SafetensorsWeights(folder, whole.skeleton)
    facts = {"kind": "directory", "path": str(folder.resolve())}
    if is_partial(config):
        facts["files"] = file_digests(folder, _files(folder), run.base, process)
    return Base(source, facts)


def recorded_base(
    facts: Mapping[str, Any],
    whole: Whole,
    *,
    kept: Path | None = None,
    process: Process | None = None,
) -> Base:
    """What the weights of a checkpoint stand on, as its manifest says.

    Args:
        kept: Where a run keeps what it knows of the files; none reads them.
        process: This rank, if all of them call it together.

    Raises:
        TrainctlError: It is gone, or is not what it was (exit code 5); names the first file.
    """
    if facts["kind"] == "seed":
        drawn = SeedWeights.of(whole.config, whole.skeleton, facts["seed"])
        if facts.get("sha256", drawn.laws_digest) != drawn.laws_digest:
            why = "the model's code, or model.initializer_range, has it draw other weights now"
            raise _changed(f"seed {facts['seed']}", why)
        return Base(drawn, dict(facts))
    path = Path(facts["path"])
    if not path.is_dir():
        raise _changed(path, "it is gone")
    if facts["kind"] == "checkpoint":
        try:
            checkpoint = Checkpoint(path)
        except ValueError as problem:
            raise _changed(path, str(problem)) from None
        if digest(checkpoint.manifest) != facts["sha256"]:
            raise _changed(path, "it is another checkpoint")
        files = {
            each["name"]: [each["bytes"], each["sha256"]] for each in checkpoint.manifest["files"]
        }
        _check(path, file_digests(path, sorted(files), kept, process), files)
        return Base(whole_weights(checkpoint, whole, process=process, is_start=True), dict(facts))
    _check(path, file_digests(path, _files(path), kept, process), facts["files"])
    return Base(SafetensorsWeights(path, whole.skeleton), dict(facts))


def whole_weights(
    checkpoint: Checkpoint,
    whole: Whole,
    *,
    kept: Path | None = None,
    process: Process | None = None,
    is_start: bool = False,
    merges: bool = True,
) -> WeightSource:
    """Return all weights of a model from a checkpoint: with its base, and its adapter merged into
    that, as it was trained beside it: quantized, if it was.

    Args:
        kept: Where its run keeps what it knows of the base's files.
        process: This rank, if all of them call it together.
        is_start: Whether a new run starts from it, whose context may be another.
        merges: Whether an adapter is merged; else its tensors are there beside the base's.

    Raises:
        TrainctlError: It is of another model, or its base is not what it was.
    """
    manifest = checkpoint.manifest
    name = str(checkpoint.path) if is_start else checkpoint.path.name
    section = adapter_of(manifest)
    adapter = low_rank(section)
    expected = dict(whole.shapes)
    if adapter is not None:
        layers = adapted_layers(whole.config, adapter)
        added = (tensor for layer in layers for tensor in added_tensors(layer, adapter))
        trained = also_trained(whole.config, adapter)
        expected = {name: shape for name, shape in expected.items() if name in trained}
        expected |= {tensor.name: list(tensor.shape) for tensor in added}
    elif "base" in manifest:
        expected = {each: shape for each, shape in expected.items() if each in manifest["shapes"]}
    try:
        check_model(whole.config, name, manifest, may_differ=OF_LONGER_CONTEXT if is_start else ())
        check_shapes(name, manifest, expected)
    except TrainctlError as error:
        if is_start:
            raise TrainctlError(f"model.initial_weights: {error.message}") from None
        raise
    if "base" not in manifest:
        return checkpoint
    base = recorded_base(manifest["base"], whole, kept=kept, process=process)
    if adapter is None:
        return Layered(checkpoint, expected, base.source)
    own = dequantized(base.source, whole.config, adapter)
    if not merges:
        return Layered(checkpoint, expected, own)
    source = Layered(checkpoint, trained, own) if trained else own
    return Merged(checkpoint, source, layers, adapter, whole.shapes)


def adapter_of(manifest: Mapping[str, Any]) -> AdapterConfig:
    """Return the adapter whose weights a checkpoint holds; kind none where it holds a model's
    own."""
    found: AdapterConfig = from_plain(AdapterConfig, manifest.get("adapter", {}))
    return found


def base_file(checkpoint: Path) -> Path:
    """Where the run of a checkpoint keeps what it knows of the files of its base."""
    return RunPaths(checkpoint.resolve().parents[1]).base


def facts_of(config: RunConfig, base: Base) -> dict[str, Any]:
    """What a manifest says where some weights do not train; nothing where all do."""
    if not is_partial(config):
        return {}
    return {"base": base.facts, "adapter": to_plain(config.adapter)}


def file_digests(
    folder: Path, files: Sequence[str], kept: Path | None, process: Process | None
) -> dict[str, list[Any]]:
    """Length and SHA-256 of files with weights.

    Args:
        kept: What is known of them, and is written anew.
        process: This rank, if all of them call it together: each reads its share.

    Raises:
        TrainctlError: One cannot be read (exit code 4); on all ranks.
    """
    rank, count = (process.rank, process.world_size) if process is not None else (0, 1)
    known = _known(kept, folder)
    mine: dict[str, list[Any]] = {}
    problem = ""
    try:
        for name in files[rank::count]:
            found = (folder / name).stat()
            size, time, sha = known.get(name, (None, None, ""))
            if (size, time) != (found.st_size, found.st_mtime_ns):
                with (folder / name).open("rb") as stream:
                    sha = hashlib.file_digest(stream, "sha256").hexdigest()
            mine[name] = [found.st_size, found.st_mtime_ns, sha]
    except OSError as error:
        problem = f"{folder}: {error}"
    shares = process.gather((mine, problem)) if process is not None else [(mine, problem)]
    problem = next((each for _, each in shares if each), "")
    if problem:
        raise TrainctlError(problem, exit_code=ExitCode.environment)
    everything = {name: entry for share, _ in shares for name, entry in share.items()}
    if kept is not None and process is not None and process.is_first and everything != known:
        write_json(kept, {"folder": str(folder.resolve()), "files": everything})
    return {name: [size, sha] for name, (size, _, sha) in sorted(everything.items())}


def _files(folder: Path) -> list[str]:
    """Of a directory's weights."""
    return sorted({tensor.file for tensor in stored_tensors(folder).values()})


def _check(folder: Path, now: Mapping[str, list[Any]], had: Mapping[str, list[Any]]) -> None:
    """Refuse files that are not what they were."""
    for name in sorted({*now, *had}):
        if name not in now or name not in had or list(now[name]) != list(had[name]):
            what = "is gone" if name not in now else "is new" if name not in had else "has changed"
            raise _changed(folder, f"{name} {what}")


def _keep(kept: Path, checkpoint: Checkpoint) -> None:
    """Note the digests of a checkpoint of which every byte has just been read."""
    folder, files = checkpoint.path, dict[str, list[Any]]()
    with suppress(OSError):  # they are read once more otherwise
        for each in checkpoint.manifest["files"]:
            time = (folder / each["name"]).stat().st_mtime_ns
            files[each["name"]] = [each["bytes"], time, each["sha256"]]
        write_json(kept, {"folder": str(folder.resolve()), "files": files})


def _known(kept: Path | None, folder: Path) -> dict[str, list[Any]]:
    """Size, time and digest of files that were read before."""
    try:
        found = json.loads(kept.read_text()) if kept is not None else {}
        if found.get("folder") != str(folder.resolve()):
            return {}
        return {str(name): [*entry] for name, entry in found["files"].items() if len(entry) == 3}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _changed(base: Path | str, what: str) -> TrainctlError:
    return TrainctlError(
        f"{base}, whose weights the run trains on top of, is not what it was: {what}",
        hint="put it back as it was; the checkpoints hold only what was trained beside it",
        exit_code=ExitCode.run_state,
    )
