"""A checkpoint as a transformers directory: sharded safetensors, config and tokenizer files.

Parameters go from the checkpoint to the files a piece at a time, so neither the model nor a shard
is ever in memory. They have the names and the form that transformers publishes the architecture in
(`trainctl.train.models.published_names`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.quantities import disk_text
from trainctl.config.schema import ModelConfig, RunConfig, TokenizerConfig
from trainctl.data.tokenizer import load_tokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.options.tokenizer import spec_of, tokenizer_facts
from trainctl.runs.atomic import sync_directory, write_json
from trainctl.runs.processes import is_alive
from trainctl.train.adapters.layers import Merged
from trainctl.train.checkpoint.content import Checkpoint
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.checkpoint.tensor_file import write_stream
from trainctl.train.models.frozen_base import Whole, base_file, whole_weights
from trainctl.train.models.model import portable, skeleton
from trainctl.train.models.mup import folded
from trainctl.train.models.published_names import Read, Unit, published_units
from trainctl.train.models.tensors import persistent_buffers
from trainctl.train.models.weights import WeightSource
from trainctl.train.prompts import first_source, prompts_of

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, unless one parameter alone is larger."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What `config.json` says of special tokens: not of the shape, and of use to whoever samples."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    files: list[str]
    """Names of the files in the folder, sorted."""
    size_bytes: int
    """Length of the weights."""
    num_parameters: int
    """Tied ones count once."""
    notes: list[str]
    """What a person should know about it."""


def export(
    config: RunConfig,
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    weights: str = MASTER,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the checkpoint's weights to a new folder that `AutoModelForCausalLM` loads.

    An adapter is merged into its base, which must be what it was.

    The folder is written under another name and renamed when it is complete.

    Args:
        checkpoint: A committed checkpoint of it.
        out: The folder; missing or empty.
        dtype: Of the written weights.
        weights: `MASTER`, or `AVERAGE` for their moving average.
        shard_bytes: Largest file of weights.
        progress: Called with the bytes of weights written and their number.

    Raises:
        TrainctlError: No space (4), the folder is not empty (2), or the checkpoint is not one of
            this model, or has no such weights (5). Nothing is left.
    """
    model = skeleton(portable(config.model), dtype)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    units = list(published_units(model))
    total = sum(_bytes(unit, dtype) for unit in units)
    saved = Checkpoint(checkpoint, weights=weights)
    source = whole_weights(saved, Whole.of(config.model, model), kept=base_file(checkpoint))
    with new_folder(out, total) as folder:
        shards = _split(units, dtype, shard_bytes)
        read = _reader(config.model, model, source)
        done = 0

        def pieces(listed: list[Unit]) -> Iterator[torch.Tensor]:
            nonlocal done
            for unit in listed:
                for piece in unit.pieces(read):
                    yield piece.to(unit.dtype or dtype)
                    done += piece.numel() * (unit.dtype or dtype).itemsize
                    progress(done, total)
                saved.close()

        for file, listed in shards.items():
            layout = {
                name: (unit.dtype or dtype, shape)
                for unit in listed
                for name, shape in unit.shapes.items()
            }
            write_stream(folder / file, layout, pieces(listed), {"format": "pt"})
        if len(shards) > 1:
            weight_map = {
                name: file
                for file, listed in shards.items()
                for unit in listed
                for name in unit.shapes
            }
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / "model.safetensors.index.json", index)
        _write_config(model, config, dtype, folder)
        notes = _copy_tokenizer(config.tokenizer, folder)
        notes += _write_chat(model, config, folder)
        if isinstance(source, Merged):
            notes.append("the adapter is merged into its base; --adapter writes it alone")
            adapter = low_rank(config.adapter)
            if adapter is not None and adapter.is_quantized:
                notes.append(
                    f"the base is what {adapter.base_weights.value} makes of it, beside which the "
                    "adapter was trained"
                )
    return Exported(
        files=sorted(path.name for path in out.iterdir()),
        size_bytes=total,
        num_parameters=sum(shape.numel() for shape in shapes.values()),
        notes=notes,
    )


@contextmanager
def new_folder(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder to fill, which becomes `out` at the end, or goes again if something fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        free_bytes = shutil.disk_usage(out.parent).free
        if free_bytes < needed_bytes:
            sizes = f"{disk_text(needed_bytes)} are needed and {disk_text(free_bytes)} free"
            raise OSError(errno.ENOSPC, sizes)
        folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        folder.mkdir()
        try:
            yield folder
            sync_directory(folder)
            folder.rename(out)  # an empty folder is replaced, any other refused
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_directory(out.parent)
    except FileNotFoundError:  # the checkpoint: it was rotated away
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise TrainctlError(f"{out} exists and is not an empty folder") from None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise TrainctlError(
            f"cannot export to {out}: {error.strerror}",
            hint="free space, or name a folder on another disk" if full else "",
            exit_code=ExitCode.environment,
        ) from None


def _remove_leftovers(out: Path) -> None:
    """Remove what killed exports to the same folder left."""
    for path in out.parent.iterdir():
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.tmp", path.name)
        if match is not None and not is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _split(units: list[Unit], dtype: torch.dtype, shard_bytes: int) -> dict[str, list[Unit]]:
    """What is written by the file that it goes to, in the model's order."""
    shards: list[list[Unit]] = [[]]
    room = shard_bytes
    for unit in units:
        size = _bytes(unit, dtype)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(unit)
        room -= size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": listed
        for number, listed in enumerate(shards, 1)
    }


def _bytes(unit: Unit, dtype: torch.dtype) -> int:
    return unit.numel * (unit.dtype or dtype).itemsize


def _reader(config: ModelConfig, model: PreTrainedModel, source: WeightSource) -> Read:
    """Return the tensors of a checkpoint, as a model without multipliers has them."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    built = {buffer.name: buffer.tensor for buffer in persistent_buffers(model)}

    def read(name: str, start: int, end: int) -> torch.Tensor:
        if name in built:
            saved = source.buffer(name)
            return (built[name] if saved is None else saved).reshape(-1)[start:end]
        values = source.read(name, shapes[name], start, end)
        return folded(config, name, shapes[name], start, values)

    return read


def _write_config(
    model: PreTrainedModel, config: RunConfig, dtype: torch.dtype, folder: Path
) -> None:
    """`config.json`, and what a model that came from a directory has beside it."""
    written = model.config
    written.architectures = [type(model).__name__]
    written.dtype = dtype
    written.use_cache = True  # off while training
    for name, number in _source_ids(config.model).items():
        setattr(written, name, number)
    if getattr(written, "eos_token_id", None) is None:  # a class of the user's may lack it
        written.eos_token_id = load_tokenizer(config.tokenizer).end_of_document
    written.save_pretrained(folder)
    if config.model.path is not None:
        source = Path(config.model.path).expanduser()
        code = source.glob("*.py") if config.model.trust_remote_code else ()
        for file in (source / "generation_config.json", *code):
            if file.is_file():
                shutil.copy(file, folder)


def _write_chat(model: PreTrainedModel, config: RunConfig, folder: Path) -> list[str]:
    """Of a run on conversations: the template that was named, and what ends an answer; notes."""
    is_named = getattr(first_source(config.data), "chat_template", None) is not None
    try:
        prompts = prompts_of(
            config.data, load_tokenizer(config.tokenizer), chat=True if is_named else None
        )
    except TrainctlError as error:  # a file of the user's: the weights need none
        return [f"without the chat template of the run: {error.message}"]
    template = prompts.template
    if template is None:
        return []
    if is_named:
        (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    file, said = folder / "generation_config.json", model.config.eos_token_id
    facts = {name: getattr(model.config, name, None) for name in TOKEN_IDS}
    if file.is_file():
        facts = json.loads(file.read_text(encoding="utf-8"))
        said = facts.get("eos_token_id", said)
    known = said if isinstance(said, list) else [] if said is None else [said]
    others = sorted(prompts.ends.difference(known))
    if others:
        ends = [*known, *others]
        write_json(file, facts | {"eos_token_id": ends if len(ends) > 1 else ends[0]})
    if not template.arguments:
        return []
    given = ", ".join(f"{name}={value!r}" for name, value in template.arguments.items())
    return [f"its chat template was given {given}: whoever asks the model gives it the same"]


def _source_ids(model: ModelConfig) -> dict[str, Any]:
    """Special token ids of the directory that a model of ours was read from, if it is there."""
    if model.path is None or not model.has_closed_form:
        return {}
    try:
        source = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: source[name] for name in TOKEN_IDS if source.get(name) is not None}


def _copy_tokenizer(config: TokenizerConfig, folder: Path) -> list[str]:
    """Copy the tokenizer's files; what to say about it."""
    spec = spec_of(config)
    if spec.published is None:
        return [f"no tokenizer files: {spec.why_not_published}"]
    files = spec.published(config)
    for name, file in files.items():
        shutil.copy(file, folder / name)
    settings = folder / "tokenizer_config.json"
    # Without it transformers guesses the class from the model's.
    if "tokenizer.json" in files and not settings.is_file():
        end = tokenizer_facts(config).end_token
        named = {"eos_token": end} if end else {}
        write_json(settings, {"tokenizer_class": "PreTrainedTokenizerFast"} | named)
    return []
