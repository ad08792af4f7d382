"""Checkpoints of Megatron-LM in its format `torch_dist`: torch DCP with Megatron's names.

Megatron-core stores layers stacked in one tensor, or each under its number. It fuses queries, keys
and values by query group, and gate and up; a norm goes by the name of the layer it is fused into.
The states of the optimizer have the names of the weights, after `optimizer.state.STATE.`
(megatron/core/dist_checkpointing, megatron/core/optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainctl.config.reading import read_json
from trainctl.errors import RunStateError
from trainctl.migration.checkpoints.dcp import DcpFolder
from trainctl.migration.checkpoints.source import Source, SourceProgress
from trainctl.migration.checkpoints.torch_states import Readable
from trainctl.migration.checkpoints.unpickle import (
    TorchFile,
    as_numbers,
    damaged,
    read_pointer,
)
from trainctl.migration.configs.pickled import Record

TRACKER = "latest_checkpointed_iteration.txt"
"""File beside the folders of the iterations, with the number of the newest."""

_RECORDS = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "signal.Signals",
)
"""Classes in common.pt (megatron/core/safe_globals.py), beside those of every trainer."""

_MASTERS = ("param", "fp32_param")
"""Names of the fp32 weights among the optimizer's states; the weights themselves without them."""

_UNREADABLE = "optimizer.distributed."
"""Prefix of states in the buckets of the distributed optimizer (`dp_reshardable`): where a
parameter lies in them follows from Megatron's run alone.
"""

_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_GROUPS = re.compile(r"optimizer\.distributed\.dp_group_idx_0\.optimizer/")
"""Key of the parameter groups where they are not in common.pt (`fully_sharded_model_space`)."""
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)\.([a-z_]+)")

_OUTER = {
    "embedding.word_embeddings": ("model.embed_tokens", "transformer.wte"),
    "embedding.position_embeddings": ("", "transformer.wpe"),
    "decoder.final_layernorm": ("model.norm", "transformer.ln_f"),
    "output_layer": ("lm_head", "lm_head"),
}
"""Modules outside of the layers, with their names in Llama and in GPT-2."""

_INNER = {
    "input_layernorm": ("input_layernorm", "ln_1"),
    "self_attention.q_layernorm": ("self_attn.q_norm", ""),
    "self_attention.k_layernorm": ("self_attn.k_norm", ""),
    "self_attention.linear_proj": ("self_attn.o_proj", "attn.c_proj"),
    "pre_mlp_layernorm": ("post_attention_layernorm", "ln_2"),
    "mlp.linear_fc2": ("mlp.down_proj", "mlp.c_proj"),
}
"""Modules of a layer that are stored as they are used."""

_FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Range of one of Megatron's tensors that a parameter of transformers is made of."""

    key: str
    start: int
    """First element in the flattened tensor."""
    stored: tuple[int, ...]
    """Shape of the elements from there on."""
    pick: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns the parameter from these elements; None if they are the parameter."""


class MegatronSource(Source):
    """A checkpoint of Megatron-LM of a decoder that is shaped like Llama, Qwen3 or GPT-2."""

    def __init__(self, directory: Path) -> None:
        self.format, self.path, self.notes = "megatron", directory, []
        self._folder = DcpFolder(directory)
        common = TorchFile(directory / "common.pt", _RECORDS).content
        if not isinstance(common, dict) or not isinstance(common.get("iteration"), int):
            raise damaged(directory / "common.pt", "it has no iteration")
        arguments = common.get("args")
        self._arguments = arguments.fields if isinstance(arguments, Record) else {}
        self._check_arguments()
        self._heads = int(self._arguments["num_attention_heads"])
        is_grouped = self._arguments.get("group_query_attention", True)
        groups = self._arguments.get("num_query_groups") if is_grouped else None
        self._groups = int(groups or self._heads)
        self._states = self._find_states()
        self._parts = dict(self._named_parts())
        self.shapes = {name: self._shape(part) for name, part in self._parts.items()}
        names = {state for state, _ in self._states} - {*_MASTERS}
        self.states = ("master", *sorted(names))
        self._check_complete()
        self._set_progress(common)
        self._last: tuple[str, str, torch.Tensor] | None = None

    def read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        part = self._parts[parameter]
        first = part.start
        if part.pick is None:
            values = self._stored(part.key, state).read(first + start, first + end)
            return as_numbers(values, self.path, f"{part.key} ({state})")
        if self._last is None or self._last[:2] != (parameter, state):
            self._last = None
            numel = math.prod(part.stored)
            values = self._stored(part.key, state).read(first, first + numel)
            numbers = as_numbers(values, self.path, f"{part.key} ({state})")
            picked = part.pick(numbers.view(part.stored)).reshape(-1)
            self._last = parameter, state, picked
        return self._last[2][start:end]

    def verify(self) -> None:
        self._folder.verify()

    def _stored(self, key: str, state: str) -> Readable:
        """Return the tensor of a state; of the weights, the fp32 ones if there are any."""
        states = _MASTERS if state == "master" else (state,)
        found = [self._states[each, key] for each in states if (each, key) in self._states]
        return found[0] if found else self._folder.tensors[key]

    def _find_states(self) -> dict[tuple[str, str], Readable]:
        """Return the optimizer's states by name and by the weights' key.

        Raises:
            TrainctlError: They are in the buckets of the distributed optimizer (exit code 5).
        """
        states: dict[tuple[str, str], Readable] = {}
        for key, tensor in self._folder.tensors.items():
            if key.startswith(_UNREADABLE):
                raise RunStateError(
                    f"{self.path}: the optimizer's states are in the buckets of Megatron's "
                    "distributed optimizer (dp_reshardable), which do not say which parameter is "
                    "where",
                    hint="let Megatron-LM load it and save it again with "
                    "--dist-ckpt-optim-fully-reshardable (or with --no-save-optim, for the weights "
                    "alone)",
                )
            if found := _STATE.fullmatch(key):
                weights = self._folder.tensors.get(found[2], tensor)
                is_flat = len(tensor.shape) > len(weights.shape)
                states[found[1], found[2]] = (
                    _Fragments(tensor, weights.shape) if is_flat else tensor
                )
        return states

    def _check_arguments(self) -> None:
        """Refuse a model whose tensors look like those of transformers and mean something else.

        Raises:
            TrainctlError: They do (exit code 5), or heads and query groups are unknown.
        """
        for name, usual in _USUAL.items():
            value = self._arguments.get(name, usual)
            if value != usual:
                raise RunStateError(
                    f"{self.path}: {name}={value} makes another function of the same weights than "
                    "transformers' models have",
                )
        if "num_attention_heads" not in self._arguments:
            raise RunStateError(
                f"{self.path / 'common.pt'} has no arguments of Megatron-LM, which say how many "
                "heads lie in a fused tensor",
            )

    def _named_parts(self) -> Iterator[tuple[str, _Part]]:
        """Yield the parameters of all tensors, by name.

        Raises:
            TrainctlError: A tensor is of no known module (exit code 5).
        """
        is_gpt2 = "embedding.position_embeddings.weight" in self._folder.tensors
        for key, tensor in self._folder.tensors.items():
            if key.startswith("optimizer."):
                continue
            parts = list(self._parts_of(key, tensor.shape, is_gpt2))
            if not parts:
                raise RunStateError(
                    f"{self.path}: {key} is of no decoder like Llama, Qwen3 or GPT-2",
                )
            yield from parts

    def _parts_of(
        self, key: str, shape: tuple[int, ...], is_gpt2: bool
    ) -> Iterator[tuple[str, _Part]]:
        """Yield the parameters in one tensor, by name; none if its module is unknown."""
        found = _LAYER.fullmatch(key)
        if found is None:
            module, _, leaf = key.rpartition(".")
            if name := _OUTER.get(module, ("", ""))[is_gpt2]:
                yield f"{name}.{leaf}", _Part(key=key, start=0, stored=shape)
            return
        number, module, leaf = found.groups()
        block = "transformer.h" if is_gpt2 else "model.layers"
        for layer, part in _layers(key, shape, number):
            for name, each in self._layer_parts(module, leaf, part, is_gpt2):
                yield f"{block}.{layer}.{name}", each

    def _layer_parts(
        self, module: str, leaf: str, part: _Part, is_gpt2: bool
    ) -> Iterator[tuple[str, _Part]]:
        """Yield the parameters in one layer's tensor, by their names in the layer."""
        if leaf.startswith("layer_norm_"):
            module, leaf = _FUSED_NORMS.get(module, ""), leaf.removeprefix("layer_norm_")
        if module == "self_attention.linear_qkv" and part.stored[0] % (
            self._heads + 2 * self._groups
        ):
            raise damaged(self.path, f"{part.key} has {part.stored[0]} rows, not whole heads")
        is_matrix = len(part.stored) > 1
        transpose = torch.t if is_gpt2 and is_matrix else None
        if name := _INNER.get(module, ("", ""))[is_gpt2]:
            yield f"{name}.{leaf}", replace(part, pick=transpose)
        elif module == "mlp.linear_fc1" and is_gpt2:
            yield f"mlp.c_fc.{leaf}", replace(part, pick=transpose)
        elif module == "mlp.linear_fc1":
            half = (part.stored[0] // 2, *part.stored[1:])
            for index, name in enumerate(("gate_proj", "up_proj")):
                start = part.start + index * math.prod(half)
                yield f"mlp.{name}.{leaf}", _Part(key=part.key, start=start, stored=half)
        elif module == "self_attention.linear_qkv" and is_gpt2:
            yield f"attn.c_attn.{leaf}", replace(part, pick=self._query_key_value)
        elif module == "self_attention.linear_qkv":
            for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
                yield f"self_attn.{name}.{leaf}", replace(part, pick=self._picker(index))

    def _picker(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda fused: self._split(fused)[index]

    def _query_key_value(self, fused: torch.Tensor) -> torch.Tensor:
        """Return GPT-2's fused layer, whose columns are all queries, all keys, all values."""
        joined = torch.cat(self._split(fused))
        return joined.t() if joined.dim() > 1 else joined

    def _split(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values: for each group its queries' heads, a key, a value."""
        each = self._heads // self._groups
        grouped = fused.reshape(self._groups, each + 2, -1, *fused.shape[1:])
        parts = grouped[:, :each], grouped[:, each], grouped[:, each + 1]
        return tuple(part.reshape(-1, *fused.shape[1:]) for part in parts)

    def _shape(self, part: _Part) -> tuple[int, ...]:
        if part.pick is None:
            return part.stored
        return tuple(part.pick(torch.empty(part.stored, device="meta")).shape)

    def _check_complete(self) -> None:
        """Refuse states that only some of the weights have.

        Raises:
            TrainctlError: A parameter lacks a state (exit code 5).
        """
        names = {state for state, _ in self._states}
        for state in names:
            for part in self._parts.values():
                if (state, part.key) not in self._states:
                    raise damaged(self.path, f"{state} of {part.key} is missing")

    def _set_progress(self, common: Mapping[str, Any]) -> None:
        """Set step, samples, tokens, learning rate and hyperparameters, and say what is not known.

        Megatron sets the learning rate after an update, so a group has that of the next one.
        """
        optimizer = common.get("optimizer")
        apart = [key for key in self._folder.values if _GROUPS.match(key)]
        if optimizer is None and apart:
            (optimizer,) = self._folder.value(apart[0])
        group = next(_parameter_groups(optimizer), {})
        samples = self._arguments.get("consumed_train_samples")
        length = self._arguments.get("seq_length")
        self.progress = SourceProgress(
            step=common["iteration"],
            samples=samples,
            tokens=samples * length if samples is not None and length else None,
            learning_rate=group.get("lr"),
        )
        named = {
            "beta1": self._arguments.get("adam_beta1"),
            "beta2": self._arguments.get("adam_beta2"),
            "epsilon": self._arguments.get("adam_eps"),
            "weight_decay": self._arguments.get("weight_decay"),
            "gradient_clipping": self._arguments.get("clip_grad"),
        }
        self.hyperparameters = {key: value for key, value in named.items() if value is not None}
        if len(self.states) > 1:
            step = group.get("step", _common_step(optimizer))
            if step is None:
                step = self.progress.step
                self.notes.append(
                    f"the number of updates is unknown: {step:,} iterations are taken for it, so "
                    "none may have been skipped by the loss scale"
                )
            self.scalars = {"step": float(step)}
        self._add_notes()

    def _add_notes(self) -> None:
        """Say how the model and its function were configured there."""
        rows = self._arguments.get("padded_vocab_size")
        if rows is not None:
            self.notes.append(
                f"Megatron's vocabulary is padded to {rows:,} rows, and all of them take part in "
                f"its loss: model.vocab_size={rows} continues the same function"
            )
        told = {key: self._arguments.get(there) for key, there in _TOLD.items()}
        said = " ".join(f"{key}={value}" for key, value in told.items() if value is not None)
        self.notes.append(f"the model as Megatron had it: {said}")


_USUAL: Mapping[str, Any] = {
    "apply_layernorm_1p": False,
    "attention_output_gate": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
}
"""Arguments that change the function of the weights, with the value that transformers' models have.
"""

_TOLD = {
    "model.num_attention_heads": "num_attention_heads",
    "model.rope_theta": "rotary_base",
    "model.norm_epsilon": "norm_epsilon",
    "training.sequence_length": "seq_length",
    "training.global_batch_size": "global_batch_size",
}
"""Keys of a configuration that no tensor shows, with Megatron's arguments."""


class _Fragments:
    """A state of shape (fragments of each axis, elements of a fragment), read like its parameter.

    Megatron-core up to 0.13 flattens a state of the distributed optimizer over the fragments that
    tensor ranks and layers make of it (`fully_sharded_model_space`).
    """

    def __init__(self, stored: Readable, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._stored = stored
        self._counts = stored.shape[:-1]
        self._sizes = [whole // count for whole, count in zip(shape, self._counts, strict=True)]

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of the flattened parameter's state."""
        end = math.prod(self.shape) if end is None else end
        block = math.prod(self.shape) // self._counts[0]
        axes = len(self.shape)
        order = [axes - 1, *(axis for i in range(axes - 1) for axis in (i, axes + i))]
        found = []
        for first in range(start // block * block, end, block):
            values = self._stored.read(first, first + block).view(*self._counts[1:], *self._sizes)
            whole = values.permute(order).reshape(-1)
            found.append(whole[max(start - first, 0) : end - first])
        return torch.cat(found)


def _layers(key: str, shape: tuple[int, ...], number: str | None) -> Iterator[tuple[int, _Part]]:
    """Yield the layers in a tensor: one by its number, or all of them stacked."""
    if number is not None:
        yield int(number), _Part(key=key, start=0, stored=shape)
        return
    for layer in range(shape[0] if math.prod(shape) else 0):
        inner = shape[1:]
        yield layer, _Part(key=key, start=layer * math.prod(inner), stored=inner)


def _common_step(optimizer: Any) -> float | None:
    """Return the number of updates that an optimizer keeps beside its states."""
    state = optimizer.get("state", {}) if isinstance(optimizer, Mapping) else {}
    step = state.get("common_step")
    return None if step is None else float(step.item())


def _parameter_groups(optimizer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameter groups at any depth: optimizers may be chained."""
    if isinstance(optimizer, Mapping):
        groups = optimizer.get("param_groups")
        if isinstance(groups, Sequence):
            yield from groups
        for value in optimizer.values():
            yield from _parameter_groups(value)


def is_here(directory: Path) -> bool:
    """Return True for a folder of Megatron-LM, or of one of its iterations."""
    if (directory / TRACKER).is_file():
        return True
    return (directory / "common.pt").is_file() and _backend(directory) is not None


def open_source(directory: Path) -> MegatronSource:
    """Open the newest iteration of a folder, or the iteration itself.

    Raises:
        TrainctlError: It is damaged (exit code 5), or in another format of Megatron.
    """
    if (directory / TRACKER).is_file():
        name = read_pointer(directory / TRACKER)
        directory /= f"iter_{int(name):07d}" if name.isdigit() else name
        if not directory.is_dir():
            raise damaged(directory, f"{TRACKER} names it, and it is missing")
    if _backend(directory) != "torch_dist":
        raise RunStateError(
            f"{directory} is no checkpoint of Megatron's format torch_dist",
            hint="convert it there: --ckpt-convert-format torch_dist --ckpt-convert-save DIR",
        )
    return MegatronSource(directory)


def _backend(directory: Path) -> str | None:
    """Return the format that metadata.json names; None without a readable one."""
    try:
        found = read_json(directory / "metadata.json")
        return str(found["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
