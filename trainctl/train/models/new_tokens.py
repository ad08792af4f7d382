"""A transformers directory with new special tokens and an embedding row for each.

The result is an ordinary directory to plan, budget, training, resumes and exports. Weight files
without embeddings are copied unchanged. The others are rewritten one tensor at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer

from trainctl.config.model_directory import fill_from_directory
from trainctl.config.registry import new_section
from trainctl.errors import MachineError, TrainctlError
from trainctl.models.hf_weights import StoredModel, tied_names
from trainctl.models.tensors import INDEX, WIDTHS, StoredTensor, stored_tensors
from trainctl.models.tokenizer_files import read_facts
from trainctl.runs.files import write_json
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.checkpoint.content import write_stream
from trainctl.train.export.output import new_folder
from trainctl.train.models.model import skeleton, with_portable_attention

ROWS = 1 << 12
"""Rows of an embedding read at once."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of weight files, which are not copied as they are."""

TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps the chat templates beside the default one."""

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens and rows added to a directory."""

    ids: dict[str, int]
    """Ids of the new tokens, by their text."""
    known: list[str]
    """Requested tokens that the tokenizer already had."""
    rows_before: int
    """Rows of the embedding in the source directory."""
    rows: int
    """Rows of the embedding in the new directory."""


def add_tokens(
    folder: Path,
    out: Path,
    tokens: Sequence[str],
    *,
    multiple_of: int = 1,
    progress: OnUnits = ignore_progress,
) -> AddedTokens:
    """Write a copy of a directory with more special tokens to a new folder.

    The row of a new token, in the embedding and in the output projection, is the mean of the
    old rows. transformers' `resize_token_embeddings` does the same and adds noise.

    Args:
        folder: A transformers directory, whose tokenizer has a `tokenizer.json`.
        out: The folder to make; missing or empty.
        multiple_of: If rows are added, round their total up to a multiple of this.
        progress: Called with the bytes of weights written and their total.

    Raises:
        TrainctlError: `folder` is no such directory or has all of these tokens, or `out` cannot be
            written. No files are left behind.
    """
    model = fill_from_directory(new_section("model", "hf", path=str(folder)))
    folder = Path(model.path or folder)
    backend, ids, known = _extend_tokenizer(folder, tokens)
    rows = max(model.vocab_size, max(ids.values()) + 1)
    if rows > model.vocab_size:
        rows = -(-rows // multiple_of) * multiple_of
    found = AddedTokens(ids, known, model.vocab_size, rows)
    stored = stored_tensors(folder)
    built = skeleton(with_portable_attention(model), torch.float32)
    growing = _token_table_names(folder, built, stored, model.vocab_size)
    sizes = {name: (rows, *stored[name].shape[1:]) for name in growing}
    total = sum(_tensor_bytes(tensor, sizes.get(name)) for name, tensor in stored.items())
    with new_folder(out, total) as made:
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.endswith((*WEIGHTS, ".index.json")):
                shutil.copy(file, made / file.name)
        if (folder / TEMPLATES).is_dir():
            shutil.copytree(folder / TEMPLATES, made / TEMPLATES)
        backend.save(str(made / "tokenizer.json"))
        _declare_tokens(made / "tokenizer_config.json", ids)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(made / "config.json", raw | {"vocab_size": rows})
        done = 0
        for name in sorted({tensor.file for tensor in stored.values()}):
            own = {key: tensor for key, tensor in stored.items() if tensor.file == name}
            if sizes.keys() & own.keys():
                _write_resized_file(folder / name, made / name, own, sizes, found)
            else:
                shutil.copy(folder / name, made / name)
            done += sum(_tensor_bytes(tensor, sizes.get(key)) for key, tensor in own.items())
            progress(done, total)
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            metadata = {**(index.get("metadata") or {}), "total_size": total}
            write_json(made / INDEX, {**index, "metadata": metadata})
    return found


def _extend_tokenizer(
    folder: Path, tokens: Sequence[str]
) -> tuple[Tokenizer, dict[str, int], list[str]]:
    """Return the directory's extended tokenizer, the new tokens' ids and the known tokens."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TrainctlError(
            f"{folder} has no tokenizer.json, to which tokens could be added",
            hint="save it by transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    first = read_facts(file).vocab_size
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TrainctlError(f"{file} is not a tokenizer: {error}") from None
    before = backend.get_vocab(with_added_tokens=True)
    new = [token for token in dict.fromkeys(tokens) if token not in before]
    known = [token for token in dict.fromkeys(tokens) if token in before]
    if not new or "" in new:
        what = "an empty token" if "" in new else "all of these tokens already"
        raise TrainctlError(f"{folder}: {what}", hint="name tokens that it lacks")
    backend.add_special_tokens([AddedToken(token, special=True) for token in new])
    after = backend.get_vocab(with_added_tokens=True)
    ids = {token: after[token] for token in new}
    if min(ids.values()) < first:
        raise TrainctlError(
            f"{file}: its ids leave gaps, into which new tokens would fall",
            hint="save it again by transformers",
        )
    return backend, ids, known


def _declare_tokens(settings: Path, ids: Mapping[str, int]) -> None:
    """Add the tokens to `added_tokens_decoder` in a tokenizer's settings, if that is there."""
    if not settings.is_file():
        return
    found = json.loads(settings.read_text(encoding="utf-8"))
    listed = found.get("added_tokens_decoder")
    if isinstance(listed, dict):
        form: dict[str, Any] = dict.fromkeys(
            ("lstrip", "normalized", "rstrip", "single_word"), False
        )
        more = {
            str(number): {"content": token, **form, "special": True}
            for token, number in ids.items()
        }
        write_json(settings, {**found, "added_tokens_decoder": {**listed, **more}})


def _token_table_names(
    folder: Path, model: Any, stored: Mapping[str, StoredTensor], rows: int
) -> set[str]:
    """Return the stored names of the tensors with a row per token.

    These are the embedding, the output projection and its bias.

    Raises:
        TrainctlError: The files do not match the model in `config.json`, or one of these tensors is
            missing or stored in a converted form.
    """
    found = StoredModel(model, stored)
    if found.problems:
        raise TrainctlError(f"{folder}: {'; '.join(found.problems)}")
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {
        parameter
        for module in modules
        if module is not None
        for parameter in module.parameters(recurse=False)
        if parameter.shape[0] == rows
    }
    joined, ties = found.joined, tied_names(model)
    names: set[str] = set()
    for name, parameter in model.named_parameters():
        if parameter not in tables:
            continue
        source = joined.get(name)
        if source is None or source.converter is not None:
            raise TrainctlError(
                f"{name}: the files have no tensor that it is",
                hint="export the model once (transformers: save_pretrained)",
            )
        names |= {source.names[0]} | {other for other in ties.get(name, ()) if other in stored}
    return names


def _tensor_bytes(tensor: StoredTensor, shape: tuple[int, ...] | None) -> int:
    return prod(shape or tensor.shape) * WIDTHS.get(tensor.dtype, 1)


def _write_resized_file(
    file: Path,
    made: Path,
    stored: Mapping[str, StoredTensor],
    sizes: Mapping[str, tuple[int, ...]],
    grown: AddedTokens,
) -> None:
    """Write a copy of a weight file in which the tensors of `sizes` have their new rows."""
    others = sorted({tensor.dtype for tensor in stored.values()} - TYPES.keys())
    if others:
        raise MachineError(
            f"{file} has tensors of type {others[0]} beside embeddings, and is not written again",
        )
    layout = {
        name: (TYPES[tensor.dtype], sizes.get(name, tensor.shape))
        for name, tensor in stored.items()
    }
    with safe_open(file, framework="pt") as opened:

        def pieces() -> Iterator[torch.Tensor]:
            for name in layout:
                if name in sizes:
                    yield from _rows_with_new_tokens(opened.get_slice(name), grown)
                else:
                    yield opened.get_tensor(name)

        write_stream(made, layout, pieces(), {"format": "pt"})


def _rows_with_new_tokens(stored: Any, grown: AddedTokens) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor with the new tokens' rows, at most `ROWS` at a time."""
    first = min(grown.rows_before, *grown.ids.values())
    total = sum(stored[a : min(a + ROWS, first)].double().sum(0) for a in range(0, first, ROWS))
    mean = torch.as_tensor(total) / first
    for start in range(0, grown.rows_before, ROWS):
        rows = stored[start : min(start + ROWS, grown.rows_before)]
        for number in grown.ids.values():
            if start <= number < start + rows.shape[0]:
                rows[number - start] = mean.to(rows.dtype)
        yield rows
    more = grown.rows - grown.rows_before
    if more:
        yield mean.to(rows.dtype).expand(more, *mean.shape).contiguous()
