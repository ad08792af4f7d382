"""Sources of parameter values: a seed, or a directory of safetensors.

A source gives any range of any parameter, so a rank that holds a shard computes or reads only that
shard.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.models.safetensors_files import stored_tensors
from trainctl.plan import mup
from trainctl.train.models.hf_weights import Converted, StoredModel
from trainctl.train.models.initial import (
    ONE,
    ZERO,
    InitializedRange,
    Initializer,
    Initializers,
    normal,
    parameter_initializers,
)

CHUNK = 1 << 16
"""Elements drawn from one generator; part of what a seed means, so never change it."""


class WeightSource(Protocol):
    """Source of a model's tensors, by canonical name."""

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a flattened parameter, at least one; fp32 on the CPU."""

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a persistent buffer; None leaves it as the model was built."""


class SeedWeights:
    """Initial weights as a pure function of (seed, canonical name, shape).

    Each parameter starts as the model's own code draws it (`initial`). Parameters without a law
    are normal if they are matrices, one if they are vectors and zero if they are biases.
    Normals are drawn in chunks, each from its own generator, so that a range costs only its own
    length.

    Args:
        std: Standard deviation of matrices without a law.
        laws: Initialisation laws of the model's own code.
        factor: Extra factor on the random values of a parameter, by its name and shape (muP).
    """

    def __init__(
        self,
        seed: int,
        *,
        std: float,
        laws: Initializers | None = None,
        factor: Callable[[str, torch.Size], float] = lambda name, shape: 1.0,
    ) -> None:
        self._seed, self._std, self._laws, self._factor = seed, std, laws or {}, factor

    @classmethod
    def of(cls, config: ModelConfig, model: PreTrainedModel, seed: int) -> SeedWeights:
        """Return the weights that a model starts from."""
        return cls(
            seed,
            std=config.initializer_range,
            laws=parameter_initializers(model),
            factor=lambda name, shape: mup.initial_factor(config, mup.kind_of(name, shape)),
        )

    @property
    def initializers_digest(self) -> str:
        """SHA-256 of all initialisation laws: other laws give a seed other weights."""
        laws = {
            name: [[each.start, each.stop, each.law.named] for each in stretches]
            for name, stretches in self._laws.items()
        }
        text = json.dumps([self._std, laws], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        values = torch.empty(end - start)
        for stretch in self._laws.get(name) or [self._usual(name, shape)]:
            first, last = max(start, stretch.start), min(end, stretch.stop)
            if first < last:
                part = values[first - start : last - start]
                self._draw(part, stretch.law, name, shape, first)
        return values

    def buffer(self, name: str) -> torch.Tensor | None:
        return None

    def _usual(self, name: str, shape: torch.Size) -> InitializedRange:
        law = normal(self._std) if len(shape) > 1 else ONE
        law = ZERO if name.endswith(".bias") else law
        return InitializedRange(0, shape.numel(), law)

    def _draw(
        self, values: torch.Tensor, law: Initializer, name: str, shape: torch.Size, start: int
    ) -> None:
        """Fill `values` with the elements of a parameter from index `start` on."""
        if not law.is_random:
            values.fill_(law.constant())
            return
        factor, end = self._factor(name, shape), start + values.numel()
        chunk = torch.empty(CHUNK)
        for index in range(start // CHUNK, math.ceil(end / CHUNK)):
            digest = hashlib.sha256(f"{self._seed}/{name}/{index}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            law.draw(chunk, generator, factor)
            base = index * CHUNK
            first, last = max(start, base), min(end, base + CHUNK)
            values[first - start : last - start] = chunk[first - base : last - base]


class SafetensorsWeights:
    """Weights of a transformers directory in safetensors, in one file or several.

    A rank reads only the ranges that it keeps, and only the experts that it keeps. If transformers
    computes a tensor of the model from others, the rank holds one such tensor at a time.

    Args:
        model: The whole model, with or without values.

    Raises:
        TrainctlError: The files do not match the model; names the tensor and the file.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._folder, self._model = folder, model
        self._stored = stored_tensors(folder)
        self._found = StoredModel(model, self._stored)
        self._last: tuple[tuple[str, int | None], dict[str, torch.Tensor]] | None = None
        problems = self._found.problems
        if problems:
            raise TrainctlError(f"model.initial_weights: {folder}: {'; '.join(problems)}")

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        joined = self._found.joined[name]
        if joined.converter is None:
            return self._range(joined.names[0], start, end)
        if not joined.by_row:
            return self._converted(joined, None)[name].reshape(-1)[start:end].clone()
        size = math.prod(shape[1:])
        rows = []
        for row in range(start // size, math.ceil(end / size)):
            values = self._converted(joined, row)[name].reshape(-1)
            rows.append(values[max(start - row * size, 0) : end - row * size])
        return torch.cat(rows)

    def buffer(self, name: str) -> torch.Tensor | None:
        joined = self._found.joined[name]
        if joined.converter is None:
            return self._whole(joined.names[0])
        return self._converted(joined, None)[name]

    def _converted(self, joined: Converted, row: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors of a conversion, cached for reads of neighbouring ranges."""
        key = joined.first, row
        if self._last is None or self._last[0] != key:
            self._last = None  # free it before the next one is made
            self._last = key, joined.convert(self._model, self._whole, row)
        return self._last[1]

    def _whole(self, name: str) -> torch.Tensor:
        with safe_open(self._folder / self._stored[name].file, framework="pt") as file:
            return file.get_tensor(name).float()

    def _range(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a flattened tensor of the files."""
        stored = self._stored[name]
        if not stored.shape:
            return self._whole(name).reshape(1)[start:end]
        width = math.prod(stored.shape[1:])
        with safe_open(self._folder / stored.file, framework="pt") as file:
            rows = file.get_slice(name)[start // width : math.ceil(end / width)]
        offset = start - start // width * width
        return rows.reshape(-1)[offset : offset + end - start].float()
