"""An adapter as PEFT's directory: `adapter_config.json` and `adapter_model.safetensors`.

`PeftModel.from_pretrained` loads it on the base that it was trained on. Tensors have PEFT's names:
`base_model.model.`, the layer's name, and `lora_A.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.options.adapter import LowRank, low_rank, spec_of
from trainctl.plans.shapes import TensorShape
from trainctl.plans.trainable import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    LinearLayer,
    adapted_layers,
    added_tensors,
    linear_layers,
    stacked_experts,
    tied_parameters,
    trainable,
)
from trainctl.runs.files import write_json
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.checkpoint.content import CheckpointReader, write_stream
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.export.directory import copy_tokenizer
from trainctl.train.export.output import ExportedCheckpoint, new_folder
from trainctl.train.models.frozen_base import adapter_of

PREFIX = "base_model.model."
ENDS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
"""PEFT's names of the adapter tensors of a layer."""
ROOT = 0.5
"""Power of the rank that rank-stabilised LoRA divides by."""


def export_adapter(
    config: RunConfig,
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    weights: str = MASTER,
    progress: OnUnits = ignore_progress,
) -> ExportedCheckpoint:
    """Write the adapter of a checkpoint to a new folder.

    Args:
        out: The folder; missing or empty.
        weights: `MASTER`, or `AVERAGE` for their moving average.
        progress: Called with the bytes of weights written and their total.

    Raises:
        TrainctlError: The checkpoint has no adapter (5), PEFT's format has no place for another
            trained tensor, or the folder cannot be written.
    """
    source = CheckpointReader(checkpoint, weights=weights)
    adapter = low_rank(adapter_of(source.manifest))
    if adapter is None:
        raise RunStateError(
            f"{checkpoint.name} has no adapter",
            hint="leave --adapter out",
        )
    layers = adapted_layers(config.model, adapter)
    tensors = {tensor.name: tensor for layer in layers for tensor in added_tensors(layer, adapter)}
    also = _trained_outside_adapter(config, layers, {*tensors})
    tensors |= {tensor.name: tensor for tensor in also}
    # PEFT reads a tied weight that trains under both of its names.
    tied = {alias: tensors[n] for alias, n in tied_parameters(config.model) if n in tensors}
    tensors |= tied
    names = _stacked_names(layers)
    layout = {names.get(n, _peft_name(n)): (dtype, _peft_shape(t)) for n, t in tensors.items()}
    total = sum(tensor.numel for tensor in tensors.values()) * dtype.itemsize
    base = source.manifest["base"]
    with new_folder(out, total) as folder:

        def values() -> Iterator[torch.Tensor]:
            done = 0
            for tensor in tensors.values():
                yield _peft_values(source, tensor).to(dtype)
                done += tensor.numel * dtype.itemsize
                progress(done, total)

        write_stream(folder / "adapter_model.safetensors", layout, values(), {"format": "pt"})
        settings = peft_config(adapter, layers, config.model, base)
        if also:
            modules = dict.fromkeys(tensor.name.rpartition(".")[0] for tensor in also)
            settings |= {"modules_to_save": [*modules], "ensure_weight_tying": bool(tied)}
        write_json(folder / "adapter_config.json", settings)
        notes = copy_tokenizer(config.tokenizer, folder)
    return ExportedCheckpoint(
        files=sorted(path.name for path in out.iterdir()),
        size_bytes=total,
        num_parameters=sum({each.name: each.numel for each in tensors.values()}.values()),
        notes=[*_base_notes(base), *notes],
    )


def _trained_outside_adapter(
    config: RunConfig, layers: Sequence[LinearLayer], added: Set[str]
) -> list[TensorShape]:
    """Return the tensors that train beside an adapter's own.

    Raises:
        TrainctlError: One belongs to a layer with an adapter, where PEFT's format has no place.
    """
    names = {layer.name for layer in layers}
    also = [tensor for tensor in trainable(config).trained if tensor.name not in added]
    for tensor in also:
        if tensor.name.rpartition(".")[0] in names:
            raise TrainctlError(
                f"{tensor.name} was trained and is of a layer with an adapter, of which PEFT saves "
                "the adapter alone",
                hint="leave --adapter out: the merged model has it",
            )
    return also


def _peft_name(name: str) -> str:
    layer, _, tensor = name.rpartition(".")
    return f"{PREFIX}{layer}.{ENDS.get(tensor, tensor)}"


def _stacked_names(layers: Sequence[LinearLayer]) -> dict[str, str]:
    """Return PEFT's names of the tensors beside stacked experts, by canonical name.

    PEFT wraps the module once for each parameter, the module's first parameter innermost
    (`ParamWrapper`); the name of a wrapper's tensor has no name of a parameter in it.
    """
    names: dict[str, str] = {}
    by_module: dict[str, list[LinearLayer]] = {}
    for layer in filter(lambda layer: layer.experts, layers):
        by_module.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    for module, stacked in by_module.items():
        for outside, layer in enumerate(reversed(stacked)):
            for tensor in (LORA_A, LORA_B):
                inside = ".base_layer" * outside
                names[layer.added_name(tensor)] = f"{PREFIX}{module}{inside}.{ENDS[tensor]}"
    return names


def _peft_shape(tensor: TensorShape) -> tuple[int, ...]:
    """Return the shape that PEFT stores: beside stacked experts A is (experts x rank, inputs) and B
    (outputs, rank x experts).
    """
    if len(tensor.shape) < 3:
        return tensor.shape
    experts, rows, columns = tensor.shape
    if tensor.name.endswith(LORA_A):
        return experts * rows, columns
    return rows, columns * experts


def _peft_values(source: CheckpointReader, tensor: TensorShape) -> torch.Tensor:
    """Return a tensor's values in the order in which PEFT stores them, flat."""
    shape = torch.Size(tensor.shape)
    values = source.read(tensor.name, shape, 0, tensor.numel)
    if len(shape) < 3 or tensor.name.endswith(LORA_A):
        return values
    return values.view(shape).permute(1, 2, 0).reshape(-1)


def peft_config(
    adapter: LowRank,
    layers: Sequence[LinearLayer],
    model: ModelConfig,
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Return PEFT's configuration of an adapter.

    Args:
        base: Entry `base` of the manifest.
    """
    spec = spec_of(adapter)
    alpha = adapter.alpha
    linear = [layer for layer in layers if not layer.experts]
    stacked = [layer for layer in layers if layer.experts]
    # PEFT takes one name for parameters and modules alike: the module's name tells them apart.
    parameters = _target_names(stacked, tuple(stacked_experts(model)), parts=2)
    if spec.rank_power not in (1, ROOT):  # PEFT divides by the rank, or by its root alone
        alpha = spec.scale(adapter) * adapter.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.score_outputs is None else "SEQ_CLS",
        "base_model_name_or_path": base["path"] if base["kind"] == "directory" else None,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": _target_names(linear, tuple(linear_layers(model))),
        **({"target_parameters": parameters} if parameters else {}),
        "use_rslora": spec.rank_power == ROOT,
        "use_dora": spec.has_magnitude,
        "fan_in_fan_out": any(layer.inputs_first for layer in linear),
        "bias": "none",
        "inference_mode": True,
    }


def _target_names(
    layers: Sequence[LinearLayer], every: Collection[LinearLayer], *, parts: int = 1
) -> list[str]:
    """Return the last parts of the adapted layers' names; whole names if that would be ambiguous.

    PEFT adapts every module whose name ends so, also outside of the blocks. The last parts are
    ambiguous if other layers of `every` share them.
    """

    def end(layer: LinearLayer) -> str:
        return ".".join(layer.name.split(".")[-parts:])

    ends = sorted({end(layer) for layer in layers})
    chosen = {layer.name for layer in layers}
    meant = {layer.name for layer in every if end(layer) in ends}
    return ends if meant == chosen else sorted(chosen)


def _base_notes(base: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a user of the adapter must know about its base."""
    if base["kind"] == "directory":
        yield f"its base is {base['path']}"
    elif base["kind"] == "checkpoint":
        yield f"its base is {base['path']}, which `trainctl export` makes a directory of"
    else:
        yield f"its base is what seed {base['seed']} draws, which no directory has"
