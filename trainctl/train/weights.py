"""Where the values of parameters come from: a seed, or a directory of safetensors.

A source gives any range of any parameter, so a rank that holds a shard computes or reads that
shard alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from trainctl.config.safetensors_files import stored_tensors
from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.options.model import spec_of
from trainctl.plan import mup
from trainctl.plan.disk_names import StoredPart, parts_of

CHUNK = 1 << 16
"""Elements drawn from one generator; part of what a seed means, so never change it."""


class WeightSource(Protocol):
    """Values of parameters by canonical name."""

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Elements [start, end), not none, of the flattened parameter: fp32 on the CPU."""


class SeedWeights:
    """Initial weights as a pure function of (seed, canonical name, shape).

    Matrices and embeddings are normal with the model's standard deviation, norms one, biases zero.
    Projections back into the residual stream are scaled by 1 / sqrt(2 num_layers) where the family
    has them so, as transformers initialises them. The normals are drawn in chunks, each from its
    own generator, so that any range costs its own length only.

    Args:
        seed: Of the run.
        std: Of matrices and embeddings.
        scaled: Endings of the names of projections into the residual stream, where they differ.
        scale: Of their deviation, besides.
        factor: Of a tensor's deviation, besides, by its name and shape.
    """

    def __init__(
        self,
        seed: int,
        *,
        std: float,
        scaled: tuple[str, ...] = (),
        scale: float = 1.0,
        factor: Callable[[str, torch.Size], float] = lambda name, shape: 1.0,
    ) -> None:
        self._seed, self._std = seed, std
        self._scaled, self._scale, self._factor = scaled, scale, factor

    @classmethod
    def of(cls, model: ModelConfig, seed: int) -> SeedWeights:
        """Those that a model starts from."""
        spec = spec_of(model)
        return cls(
            seed,
            std=model.initializer_range,
            scaled=spec.rows if spec.scales_residuals else (),
            scale=1 / math.sqrt(2 * max(model.num_layers, 1)),
            factor=lambda name, shape: mup.initial_factor(model, mup.kind_of(name, shape)),
        )

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(end - start)
        if len(shape) < 2:
            return torch.ones(end - start)
        std = self._std * (self._scale if name.endswith(self._scaled) else 1.0)
        std *= self._factor(name, shape)
        values, chunk = torch.empty(end - start), torch.empty(CHUNK)
        for index in range(start // CHUNK, math.ceil(end / CHUNK)):
            digest = hashlib.sha256(f"{self._seed}/{name}/{index}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            chunk.normal_(std=std, generator=generator)
            base = index * CHUNK
            first, last = max(start, base), min(end, base + CHUNK)
            values[first - start : last - start] = chunk[first - base : last - base]
        return values


class SafetensorsWeights:
    """Weights of a transformers directory in safetensors, one file or sharded.

    A rank reads the ranges that it keeps and no others, of experts too: see
    `trainctl.plan.disk_names` for how published names become a model's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored = stored_tensors(folder)

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        parts = parts_of(name, shape, self._stored)
        if not parts:
            raise TrainctlError(f"model.initial_weights: {self._folder} has no tensor {name}")
        size = math.prod(parts[0].shape)
        first, last = start // size, math.ceil(end / size)
        pieces = [
            self._piece(part, max(start - at, 0), min(end - at, size))
            for at, part in zip(
                range(first * size, last * size, size), parts[first:last], strict=True
            )
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, part: StoredPart, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of a flattened tensor of the files."""
        shape = part.shape
        with safe_open(self._folder / self._stored[part.name].file, framework="pt") as file:
            tensor = file.get_slice(part.name)
            if tuple(tensor.get_shape()) != shape:
                raise TrainctlError(
                    f"model.initial_weights: {part.name} has shape {tensor.get_shape()}, "
                    f"the model's is {list(shape)}"
                )
            width = math.prod(shape[1:])
            rows = tensor[start // width : math.ceil(end / width)]
        offset = start - start // width * width
        return rows.reshape(-1)[offset : offset + end - start].float()
