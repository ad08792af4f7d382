"""Base weights of runs that train only some of their weights.

A checkpoint of such a run holds only the weights that train. Its manifest records their base in
`base`: a seed, with a digest of the initialisation it drives; a directory of safetensors, with the
SHA-256 of each file; or another run's checkpoint, with the SHA-256 of its manifest, which in turn
lists its files. Each base file is hashed once per run, and the ranks share the work. The run keeps
the digests with the size and mtime of the files, and hashes a file again only if these differ.
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
from trainctl.config.schema import AdapterConfig, ModelConfig, RunConfig
from trainctl.engines.process import Process
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.models.tensors import may_be_new, stored_tensors
from trainctl.options.adapter import low_rank
from trainctl.plans.identity import START_KEYS, check_model, check_shapes
from trainctl.plans.trainable import adapted_layers, added_tensors, also_trained, is_partial
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import identity_digest
from trainctl.train.adapters.layers import MergedWeights
from trainctl.train.adapters.quantized import dequantized_source
from trainctl.train.checkpoint.content import CheckpointReader, find_weights_checkpoint
from trainctl.train.models.weights import SafetensorsWeights, SeedWeights, WeightSource

Shapes = Mapping[str, list[int]]


@dataclass(frozen=True, slots=True)
class Base:
    """The weights that a run starts from, and their entry in the manifest."""

    source: WeightSource
    """Source of all of the model's own weights, as they are at step 0."""
    facts: dict[str, Any]
    """Entry `base` in the manifest of each checkpoint."""


@dataclass(frozen=True, slots=True)
class FullModel:
    """A model whose weights are read: not sharded, not cut to a stage, without an adapter."""

    config: ModelConfig
    skeleton: PreTrainedModel
    shapes: Shapes
    """Shapes of its parameters, by canonical name."""

    @classmethod
    def of(cls, config: ModelConfig, skeleton: PreTrainedModel) -> FullModel:
        """Build a `FullModel` from a whole skeleton."""
        shapes = {name: list(each.shape) for name, each in skeleton.named_parameters()}
        return cls(config, skeleton, shapes)


class OverlayWeights:
    """A weight source that reads some tensors from one source and the rest from another."""

    def __init__(self, own: WeightSource, names: Collection[str], base: WeightSource) -> None:
        self._own, self._names, self._base = own, frozenset(names), base

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a parameter."""
        source = self._own if name in self._names else self._base
        return source.read(name, shape, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a persistent buffer, from `own` if it has the buffer."""
        values = self._own.buffer(name)
        return self._base.buffer(name) if values is None else values


def initial_base(whole: FullModel, config: RunConfig, run: RunPaths, process: Process) -> Base:
    """Return the weights that a run starts from; all ranks call this together.

    File digests are computed only if some of the base weights never reach a checkpoint.

    Raises:
        TrainctlError: The weights do not exist, or belong to another model.
    """
    model, seed = whole.config, config.training.seed
    if model.initial_weights is None:
        drawn = SeedWeights.of(model, whole.skeleton, seed)
        return Base(drawn, {"kind": "seed", "seed": seed, "sha256": drawn.initializers_digest})
    folder = local_path(model.initial_weights)
    checkpoint = find_weights_checkpoint(folder, process)
    if checkpoint is not None:
        facts: dict[str, Any] = {"kind": "checkpoint", "path": str(checkpoint.path.resolve())}
        facts["sha256"] = identity_digest(checkpoint.manifest)
        if is_partial(config) and process.is_first:
            _cache_digests(run.base, checkpoint)
        started = whole_weights(checkpoint, whole, process=process, is_start=True)
        shapes = checkpoint.manifest["shapes"].items()
        same = {name for name, shape in shapes if shape == whole.shapes.get(name)}
        return Base(_with_new_tensors(started, same, whole, seed), facts)
    source = SafetensorsWeights(folder, whole.skeleton)
    facts = {"kind": "directory", "path": str(folder.resolve())}
    if is_partial(config):
        facts["files"] = file_digests(folder, _weight_file_names(folder), run.base, process)
    return Base(_with_new_tensors(source, source.names, whole, seed), facts)


def _with_new_tensors(
    source: WeightSource, names: Collection[str], whole: FullModel, seed: int
) -> WeightSource:
    """Return a source that draws from the seed what an objective adds to the model, unless it is
    among `names`.
    """
    new = {name for name in whole.shapes if may_be_new(name) and name not in names}
    if not new:
        return source
    return OverlayWeights(SeedWeights.of(whole.config, whole.skeleton, seed), new, source)


def recorded_base(
    facts: Mapping[str, Any],
    whole: FullModel,
    *,
    kept: Path | None = None,
    process: Process | None = None,
) -> Base:
    """Return the base weights that the manifest of a checkpoint names.

    Args:
        facts: Entry `base` of the manifest.
        kept: File in which the run keeps the digests of the base's files. Without it, every file is
            read.
        process: This rank, if all ranks call this together.

    Raises:
        TrainctlError: The base is gone or has changed (exit code 5); names the first such file.
    """
    if facts["kind"] == "seed":
        drawn = SeedWeights.of(whole.config, whole.skeleton, facts["seed"])
        if facts.get("sha256", drawn.initializers_digest) != drawn.initializers_digest:
            why = "the model's code, or model.initializer_range, has it draw other weights now"
            raise _base_changed_error(f"seed {facts['seed']}", why)
        return Base(drawn, dict(facts))
    path = Path(facts["path"])
    if not path.is_dir():
        raise _base_changed_error(path, "it is gone")
    if facts["kind"] == "checkpoint":
        try:
            checkpoint = CheckpointReader(path)
        except ValueError as problem:
            raise _base_changed_error(path, str(problem)) from None
        if identity_digest(checkpoint.manifest) != facts["sha256"]:
            raise _base_changed_error(path, "it is another checkpoint")
        files = {
            each["name"]: [each["bytes"], each["sha256"]] for each in checkpoint.manifest["files"]
        }
        _require_unchanged(path, file_digests(path, sorted(files), kept, process), files)
        return Base(whole_weights(checkpoint, whole, process=process, is_start=True), dict(facts))
    _require_unchanged(
        path, file_digests(path, _weight_file_names(path), kept, process), facts["files"]
    )
    return Base(SafetensorsWeights(path, whole.skeleton), dict(facts))


def whole_weights(
    checkpoint: CheckpointReader,
    whole: FullModel,
    *,
    kept: Path | None = None,
    process: Process | None = None,
    is_start: bool = False,
    merges: bool = True,
) -> WeightSource:
    """Return all weights of a model from a checkpoint: base, trained weights and merged adapter.

    An adapter trained on a quantized base is merged into the base as quantized.

    Args:
        kept: File in which the checkpoint's run keeps the digests of the base's files.
        process: This rank, if all ranks call this together.
        is_start: Whether a new run starts from the checkpoint; its context length may then differ.
        merges: Whether to merge an adapter; else the source gives its tensors beside the base's.

    Raises:
        TrainctlError: The checkpoint is of another model, or its base has changed.
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
    compared, saved = expected, manifest["shapes"]
    if is_start:
        compared, saved = (_shapes_to_continue(whole, shapes) for shapes in (compared, saved))
    try:
        check_model(whole.config, name, manifest, may_differ=START_KEYS if is_start else ())
        check_shapes(name, {"shapes": saved}, compared)
    except TrainctlError as error:
        if is_start:
            raise TrainctlError(f"model.initial_weights: {error.message}") from None
        raise
    if "base" not in manifest:
        return checkpoint
    base = recorded_base(manifest["base"], whole, kept=kept, process=process)
    if adapter is None:
        return OverlayWeights(checkpoint, expected, base.source)
    own = dequantized_source(base.source, whole.config, adapter)
    if not merges:
        return OverlayWeights(checkpoint, expected, own)
    source = OverlayWeights(checkpoint, trained, own) if trained else own
    return MergedWeights(checkpoint, source, layers, adapter, whole.shapes)


def _shapes_to_continue(whole: FullModel, shapes: Shapes) -> dict[str, list[int]]:
    """Return the shapes that a new run's start must have: not those of another head, or of blocks
    that an objective adds.
    """
    if whole.config.score_outputs is None:
        return {name: shape for name, shape in shapes.items() if not may_be_new(name)}
    inside = f"{whole.skeleton.base_model_prefix}."
    return {name: shape for name, shape in shapes.items() if name.startswith(inside)}


def adapter_of(manifest: Mapping[str, Any]) -> AdapterConfig:
    """Return the adapter section of a checkpoint's manifest; kind none if it has no adapter."""
    return from_plain(AdapterConfig, manifest.get("adapter", {}))


def base_file(checkpoint: Path) -> Path:
    """Return the file in which the run of a checkpoint keeps the digests of its base's files."""
    return RunPaths(checkpoint.resolve().parents[1]).base


def manifest_entries(config: RunConfig, base: Base) -> dict[str, Any]:
    """Return the manifest entries `base` and `adapter` of a run with frozen weights; else empty."""
    if not is_partial(config):
        return {}
    return {"base": base.facts, "adapter": to_plain(config.adapter)}


def file_digests(
    folder: Path, files: Sequence[str], kept: Path | None, process: Process | None
) -> dict[str, list[Any]]:
    """Return length and SHA-256 of each file.

    Args:
        kept: Cache of digests, by size and mtime. The first rank writes it anew.
        process: This rank, if all ranks call this together: each hashes its share of the files.

    Raises:
        TrainctlError: A file cannot be read (exit code 4); raised on all ranks.
    """
    rank, count = (process.rank, process.world_size) if process is not None else (0, 1)
    known = _cached_digests(kept, folder)
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
        raise MachineError(problem)
    everything = {name: entry for share, _ in shares for name, entry in share.items()}
    if kept is not None and process is not None and process.is_first and everything != known:
        with suppress(OSError):  # without the cache they are hashed again
            write_json(kept, {"folder": str(folder.resolve()), "files": everything})
    return {name: [size, sha] for name, (size, _, sha) in sorted(everything.items())}


def _weight_file_names(folder: Path) -> list[str]:
    """Return the names of a directory's weight files, sorted."""
    return sorted({tensor.file for tensor in stored_tensors(folder).values()})


def _require_unchanged(
    folder: Path, now: Mapping[str, list[Any]], had: Mapping[str, list[Any]]
) -> None:
    """Refuse files that have changed since they were recorded, and missing or new ones."""
    for name in sorted({*now, *had}):
        if name not in now or name not in had or list(now[name]) != list(had[name]):
            what = "is gone" if name not in now else "is new" if name not in had else "has changed"
            raise _base_changed_error(folder, f"{name} {what}")


def _cache_digests(kept: Path, checkpoint: CheckpointReader) -> None:
    """Cache the digests from the manifest of a checkpoint whose files were just verified."""
    folder, files = checkpoint.path, dict[str, list[Any]]()
    with suppress(OSError):  # without the cache the files are hashed once more
        for each in checkpoint.manifest["files"]:
            time = (folder / each["name"]).stat().st_mtime_ns
            files[each["name"]] = [each["bytes"], time, each["sha256"]]
        write_json(kept, {"folder": str(folder.resolve()), "files": files})


def _cached_digests(kept: Path | None, folder: Path) -> dict[str, list[Any]]:
    """Return size, mtime and digest of the files in the cache; empty if it is of another folder."""
    try:
        found = json.loads(kept.read_text()) if kept is not None else {}
        if found.get("folder") != str(folder.resolve()):
            return {}
        return {str(name): [*entry] for name, entry in found["files"].items() if len(entry) == 3}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _base_changed_error(base: Path | str, what: str) -> TrainctlError:
    return RunStateError(
        f"{base}, whose weights the run trains on top of, is not what it was: {what}",
        hint="put it back as it was; the checkpoints hold only what was trained beside it",
    )
