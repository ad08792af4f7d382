"""Reader of torch's distributed checkpoints (DCP), also of torchtitan's.

A directory has `.metadata`, a pickle that lists every tensor with its chunks, and files of chunks,
each of them a file of `torch.save` at an offset (torch/distributed/checkpoint/filesystem.py and
metadata.py). An optimizer is saved as `PREFIX.state.PARAMETER.NAME` and `PREFIX.param_groups.…`,
the weights beside it under a prefix of their own, or none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.reading import read_bytes
from trainctl.engines.shards import Shard, read_shard
from trainctl.migration.checkpoints.source import Source, SourceProgress, without_wrappers
from trainctl.migration.checkpoints.torch_states import (
    Readable,
    SavedOptimizer,
    TorchSource,
    match_weights,
    unusable,
)
from trainctl.migration.checkpoints.unpickle import (
    MOST_PICKLE_BYTES,
    TorchFile,
    damaged,
    unpickle,
)
from trainctl.migration.configs.pickled import Record
from trainctl.untrusted import is_count, safe_name, safe_path

METADATA = ".metadata"

_CLASSES = {
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(  # Megatron-core keeps the plans of the ranks
        f"torch.distributed.checkpoint.planner.{name}"
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
}


@dataclass(eq=False, slots=True)
class _Stored:
    """An entry of a file: a chunk of a tensor, or a value."""

    path: Path
    offset: int
    length: int
    numel: int | None = None
    """Elements of the chunk; None for a value."""
    opened: TorchFile | None = None

    def open(self) -> Any:
        """Return what was saved; the file is kept, for `verify`.

        Raises:
            TrainctlError: It is no tensor of the chunk's size (exit code 5).
        """
        if self.opened is None:
            self.opened = TorchFile(self.path, span=(self.offset, self.length))
            content = self.opened.content
            if self.numel is not None and getattr(content, "numel", None) != self.numel:
                raise damaged(
                    self.path, f"it has no chunk of {self.numel:,} elements where it says"
                )
        return self.opened.content


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor's elements, or a part of one in its leading dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: _Stored
    start: int = 0
    """First element in the stored, flattened chunk."""

    def overlaps(self, first: int, last: int) -> bool:
        """Return True if it has elements of the rows [first, last)."""
        start = self.offsets[0]
        return max(first, start) < min(last, start + self.sizes[0]) and math.prod(self.sizes) > 0

    def row(self, index: int) -> TensorChunk:
        """Return the part at one index of the first dimension, without that dimension."""
        skipped = (index - self.offsets[0]) * math.prod(self.sizes[1:])
        return replace(
            self, offsets=self.offsets[1:], sizes=self.sizes[1:], start=self.start + skipped
        )


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor in chunks, which are read by ranges."""

    shape: tuple[int, ...]
    chunks: Sequence[TensorChunk]

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        if not self.shape:
            whole: torch.Tensor = self.chunks[0].stored.open().read()
            return whole.reshape(-1)
        return _read(self.shape, self.chunks, start, math.prod(self.shape) if end is None else end)


def _read(
    shape: tuple[int, ...], chunks: Sequence[TensorChunk], start: int, end: int
) -> torch.Tensor:
    """Return elements [start, end) of a flattened tensor of at least one dimension."""
    width = math.prod(shape[1:])
    first, last = start // width, -(-end // width)
    here = [each for each in chunks if each.overlaps(first, last)]
    if last - first == 1 and len(shape) > 1:
        rows = [each.row(first) for each in here]
        return _read(shape[1:], rows, start - first * width, end - first * width)
    result: torch.Tensor | None = None
    for chunk in here:
        top, bottom = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
        inner = math.prod(chunk.sizes[1:])
        begin = chunk.start + (top - chunk.offsets[0]) * inner
        values = chunk.stored.open().read(begin, begin + (bottom - top) * inner)
        if result is None:
            result = torch.empty((last - first, *shape[1:]), dtype=values.dtype)
        if result.dtype != values.dtype:
            raise damaged(chunk.stored.path, "chunks of one tensor have several types")
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        box = (slice(top - first, bottom - first), *map(slice, chunk.offsets[1:], ends[1:]))
        result[box] = values.view(bottom - top, *chunk.sizes[1:])
    assert result is not None  # the chunks make up the tensor
    return result.view(-1)[start - first * width : end - first * width]


class DcpFolder:
    """A directory of `torch.distributed.checkpoint.save`.

    Attributes:
        tensors: Tensors by key.
        values: Keys of everything else.

    Raises:
        TrainctlError: The metadata or a file of chunks is missing or truncated, or chunks do not
            make up a tensor; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            pickled = read_bytes(path / METADATA, most_bytes=MOST_PICKLE_BYTES)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            why = f"it cannot be read ({why}): was the save interrupted?"
            raise damaged(path / METADATA, why) from None
        metadata = unpickle(pickled, path / METADATA, records=_CLASSES)
        if not isinstance(metadata, Record) or not isinstance(metadata.get("storage_data"), dict):
            raise damaged(path / METADATA, "it is no metadata of a distributed checkpoint")
        sizes: dict[str, int] = {}
        self._stored: dict[tuple[str, tuple[int, ...]], _Stored] = {}
        for index, info in metadata.get("storage_data").items():
            self._add(index, info, sizes)
        self._require_own_bytes()
        self.tensors: dict[str, ChunkedTensor] = {}
        self.values: list[str] = []
        for key, entry in metadata.get("state_dict_metadata", {}).items():
            if entry.kind.endswith(".TensorStorageMetadata"):
                self.tensors[key] = self._tensor(key, entry)
            else:
                self.values.append(key)

    def value(self, key: str) -> Any:
        """Return a value that is no tensor; None if it is an object of another program.

        A value that was saved as a tensor of one element is a number.
        """
        if key in self.tensors:
            tensor = self.tensors[key]
            return tensor.read().item() if math.prod(tensor.shape) == 1 else None
        stored = self._stored.get((key, ()))
        if stored is None:
            raise damaged(self.path / METADATA, f"it does not say where {key} is")
        return stored.open()

    def verify(self) -> None:
        """Compare the checksums of the chunks that were read.

        Raises:
            TrainctlError: One differs.
        """
        for stored in self._stored.values():
            if stored.opened is not None:
                stored.opened.verify()

    def _add(self, index: Record, info: Record, sizes: dict[str, int]) -> None:
        name, offset, length = (info.get(k) for k in ("relative_path", "offset", "length"))
        try:
            file = safe_path(self.path, safe_name(name))
        except ValueError as error:
            raise damaged(self.path / METADATA, f"{error} in its directory") from None
        if info.get("transform_descriptors"):
            raise unusable(self.path, f"{name} is compressed or encrypted by an extension of DCP")
        if name not in sizes:
            sizes[name] = file.stat().st_size if file.is_file() else -1
        if sizes[name] < 0:
            raise damaged(file, "it is missing")
        if not (is_count(offset) and is_count(length)) or offset + length > sizes[name]:
            raise damaged(file, f"it is truncated: it has {sizes[name]:,} bytes")
        place = tuple(index.get("offset") or ())
        self._stored[index.get("fqn"), place] = _Stored(file, offset, length)

    def _require_own_bytes(self) -> None:
        """Refuse two entries that lie in the same bytes: one of them has another's values.

        A tied weight may be stored once for all of its names.
        """
        places = sorted(
            (each.path, each.offset, each.length, key) for (key, _), each in self._stored.items()
        )
        for (path, offset, length, key), (other, start, size, name) in pairwise(places):
            is_alias = (offset, length) == (start, size) and key != name
            if path == other and start < offset + length and not is_alias:
                raise damaged(path, f"{key} and {name} lie in the same bytes of it")

    def _tensor(self, key: str, entry: Record) -> ChunkedTensor:
        shape, chunks = tuple(entry.get("size")), []
        for each in entry.get("chunks"):
            offsets, sizes = tuple(each.get("offsets")), tuple(each.get("sizes"))
            stored = self._stored.get((key, offsets))
            if stored is None:
                raise damaged(self.path / METADATA, f"it does not say where {key} is")
            chunks.append(TensorChunk(offsets, sizes, stored))
            stored.numel = math.prod(sizes)
        if not _make_up(shape, [(each.offsets, each.sizes) for each in chunks]):
            raise damaged(self.path / METADATA, f"the chunks of {key} do not make it up")
        return ChunkedTensor(shape, chunks)


def _make_up(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], ...]]) -> bool:
    """Return True if every element of a tensor is in exactly one of the boxes (offsets, sizes)."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if not all(map(is_count, (*shape, *offsets, *sizes))):
            return False
        if any(o + s > d for o, s, d in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    if not shape:
        return True
    near: list[tuple[tuple[int, ...], ...]] = []  # boxes that reach the rows of this one
    for offsets, sizes in sorted(box for box in boxes if math.prod(box[1])):
        near = [box for box in near if box[0][0] + box[1][0] > offsets[0]]
        if any(_overlap(box, (offsets, sizes)) for box in near):
            return False
        near.append((offsets, sizes))
    return True


def _overlap(box: tuple[tuple[int, ...], ...], other: tuple[tuple[int, ...], ...]) -> bool:
    sides = zip(*box, *other, strict=True)
    return all(max(a, b) < min(a + size, b + width) for a, size, b, width in sides)


def is_here(directory: Path) -> bool:
    return (newest_step(directory, "step-*") / METADATA).is_file()


def open_source(directory: Path) -> Source:
    path = newest_step(directory, "step-*")
    return DcpSource("dcp", path, [DcpFolder(path)])


def newest_step(directory: Path, pattern: str) -> Path:
    """Return the subdirectory of the newest step, or the directory itself if it has none.

    Args:
        pattern: Names of the subdirectories of steps, which end in the step.
    """
    steps = [path for path in directory.glob(pattern) if re.search(r"\d$", path.name)]
    return max(steps, key=lambda path: int(re.split(r"\D", path.name)[-1]), default=directory)


class DcpSource(TorchSource):
    """Weights and optimizer in distributed checkpoints.

    Args:
        folders: Directories that make up the checkpoint: one, or one each for weights and
            optimizer, as accelerate saves FSDP.
    """

    def __init__(self, format: str, path: Path, folders: Sequence[DcpFolder]) -> None:
        self._folders = folders
        keys = [key for folder in folders for key in (*folder.tensors, *folder.values)]
        marks = (re.match(r"(.*?)(?:param_groups\.|state\.(?=.+\.exp_avg$))", key) for key in keys)
        prefixes = {mark[1] for mark in marks if mark}
        if len(prefixes) > 1:
            names = ", ".join(sorted(prefixes))
            raise unusable(path, f"it has several optimizers, and a run has one: {names}")
        self._prefix = prefixes.pop() if prefixes else None
        optimizer = None if self._prefix is None else self._saved_optimizer(path, self._prefix)
        self._stored: dict[str, Readable] = {
            without_wrappers(key): tensor
            for folder in folders
            for key, tensor in folder.tensors.items()
            if tensor.shape and (self._prefix is None or not self._is_of_optimizer(key))
        }
        shapes = {key: tensor.shape for key, tensor in self._stored.items()}
        super().__init__(format, path, shapes, optimizer, [each.verify for each in folders])
        self._weights: Mapping[str, Readable] = self._stored
        self.progress = SourceProgress(
            step=self._number("step", "global_step"),
            samples=self._number("samples"),
            tokens=self._number("ntokens_seen", "tokens"),
            learning_rate=None if optimizer is None else optimizer.learning_rate,
        )

    def _use_weights(self, model: PreTrainedModel) -> None:
        if any(key.endswith("tok_embeddings.weight") for key in self._stored):
            self._rename_torchtitan(model)
        self._weights = match_weights(self._stored, model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def _read_weights(self, parameter: str, start: int, end: int) -> torch.Tensor:
        return self._weights[parameter].read(start, end)

    def _is_of_optimizer(self, key: str) -> bool:
        return key.startswith((f"{self._prefix}state.", f"{self._prefix}param_groups."))

    def _saved_optimizer(self, path: Path, prefix: str) -> SavedOptimizer:
        state: dict[str, dict[str, Any]] = {}
        groups: dict[str, dict[str, Any]] = {}
        for folder in self._folders:
            for key in (*folder.tensors, *folder.values):
                rest = key.removeprefix(f"{prefix}state.")
                if rest != key:
                    name, _, kind = rest.rpartition(".")
                    value = folder.tensors.get(key) or folder.value(key)
                    state.setdefault(without_wrappers(name), {})[kind] = value
                rest = key.removeprefix(f"{prefix}param_groups.")
                name, _, kind = rest.rpartition(".")
                if rest != key and (name.isdigit() or kind in _SETTINGS):
                    groups.setdefault(name, {})[kind] = folder.value(key)
        return SavedOptimizer(path, state, list(groups.values()))

    def _number(self, *names: str) -> int | None:
        """Return a counter that the checkpoint has beside the optimizer under one of the names."""
        for folder in self._folders:
            for key in (*folder.tensors, *folder.values):
                is_beside = self._prefix is None or not self._is_of_optimizer(key)
                if is_beside and key.rpartition(".")[2] in names:
                    value = folder.value(key)
                    if isinstance(value, int | float):
                        return int(value)
        return None

    def _rename_torchtitan(self, model: PreTrainedModel) -> None:
        """Give torchtitan's tensors the names and the rows of transformers."""
        rename = TorchtitanNames(self.path, model)
        self._stored = dict(rename.weights(self._stored))
        self.notes.append("torchtitan's names, and its rows of q and k, are read as transformers'")
        if self._optimizer is not None:
            states: dict[str, dict[str, Any]] = {}
            for key, saved in self._optimizer.state.items():
                for kind, value in saved.items():
                    for name, part in rename.parts(str(key), value):
                        states.setdefault(name, {})[kind] = part
            self._optimizer = replace(self._optimizer, state=states)


_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""Settings of a parameter group that are read where each parameter has its own."""

_TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "lm_head": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Modules of torchtitan's dense Llama and Qwen 3 and their names in transformers.

Its `from_hf_map` (torchtitan/models/llama3/state_dict_adapter.py and qwen3/). Older versions have
no `qkv_linear` in names, and `output` for `lm_head`.
"""


class TorchtitanNames:
    """Names of torchtitan's tensors in transformers, and their rows.

    torchtitan's Llama rotates pairs of neighbouring rows, transformers pairs of the two halves of a
    head; so the rows of q and k are permuted, as in the published weights. Its Qwen 3, which has
    norms of q and k, rotates halves.

    Args:
        path: Directory to name in errors.
        model: The model, which tells the numbers of heads.
    """

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self._path, config = path, model.config
        heads = int(config.num_attention_heads)
        self._heads = {
            "attention.wq": heads,
            "attention.wk": int(getattr(config, "num_key_value_heads", None) or heads),
        }
        self._has_norms = any("q_norm" in name for name, _ in model.named_parameters())

    def weights(self, stored: Mapping[str, Readable]) -> Iterator[tuple[str, Readable]]:
        """Yield the weights with their names in transformers."""
        for key, tensor in stored.items():
            if key.rpartition(".")[2] in ("weight", "bias"):
                yield from self.parts(key.removeprefix("model."), tensor)

    def parts(self, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield a weight, or a state of one, with its names in transformers and their rows.

        A number is yielded as it is.

        Raises:
            TrainctlError: It is of another model than those that are read.
        """
        found = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", key)
        layer, module, kind = ("", "", "") if found is None else found.groups(default="")
        module = module.replace("qkv_linear.", "")
        shape = getattr(value, "shape", ())
        fused = self._fused_parts(key, shape) if module == "attention.wqkv" else {}
        for own, shard in fused.items() or [(module, None)]:
            if own not in _TORCHTITAN:
                raise unusable(
                    self._path,
                    f"{key} of torchtitan has no known name in transformers",
                    "dense Llama and Qwen 3 are read; others: torchtitan's convert_to_hf.py, and "
                    "model.initial_weights",
                )
            part = value if shard is None or not shape else RowsOf(value, shard)
            heads = 0 if self._has_norms or not shape else self._heads.get(own, 0)
            prefix = f"model.{layer}" if layer else ""
            name = f"{prefix}{_TORCHTITAN[own]}.{kind}"
            yield name, RotatedRows(part, heads) if heads else part

    def _fused_parts(self, key: str, shape: tuple[int, ...]) -> dict[str, Shard]:
        """Return the rows of q, k and v in their fused tensor: those of each group of heads that
        share a key follow each other (`FusedQKVLinear`). torchtitan saves weights apart, and the
        states of the optimizer fused.
        """
        groups, width = self._heads["attention.wk"], math.prod(shape[1:])
        queries = self._heads["attention.wq"] // groups
        rows = shape[0] if shape else groups * (queries + 2)
        if rows % (groups * (queries + 2)):
            raise unusable(self._path, f"{key} has {rows} rows, for {groups} groups of heads")
        group = rows // groups * width
        head = group // (queries + 2)
        ends = (0, queries * head, (queries + 1) * head, group)
        names = ("attention.wq", "attention.wk", "attention.wv")
        return {
            name: Shard(group, start, stop)
            for name, start, stop in zip(names, ends[:-1], ends[1:], strict=True)
        }


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Rows of a tensor that a shard picks."""

    tensor: Readable
    shard: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows together."""
        first, *others = self.tensor.shape
        return first * self.shard.width // self.shard.row, *others

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of the flattened rows."""
        end = math.prod(self.shape) if end is None else end
        return read_shard(self.tensor.read, self.shard, start, end)


@dataclass(frozen=True, slots=True)
class RotatedRows:
    """A matrix of q or k whose pairs of neighbouring rows become pairs of a head's halves."""

    tensor: Readable
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.tensor.shape

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of the flattened matrix; whole heads are read."""
        numel = math.prod(self.shape)
        end, head = numel if end is None else end, numel // self.heads
        width = math.prod(self.shape[1:])
        first, last = start // head, -(-end // head)
        rows = self.tensor.read(first * head, last * head).view(last - first, -1, 2, width)
        return rows.transpose(1, 2).reshape(-1)[start - first * head : end - first * head]
