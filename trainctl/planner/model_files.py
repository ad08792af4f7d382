"""Files of weights and tokenizers held against the model, before anything starts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainctl.config.hub import fetch_weights
from trainctl.config.safetensors_files import (
    READABLE,
    StoredTensor,
    has_pickled_weights,
    has_weights,
    stored_tensors,
)
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.plan.disk_names import StoredPart, parts_of
from trainctl.plan.shapes import TensorShape, all_tensors

NOT_ITS_WEIGHTS, NO_WEIGHTS, LEFT_OVER = "TC148", "TC145", "TC149"

SHOWN = 3
"""Tensors that a message names."""

HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "lm_head.weight")
"""Ends of names of what some files hold beside the parameters: tables, masks, a tied head."""


ROUTING = ("e_score_correction_bias",)
"""Ends of names of buffers that a model's outputs depend on."""


def check_model_files(config: RunConfig) -> list[Finding]:
    """What is wrong with the weights that a run is to start from.

    Names, shapes and types are read from the headers; the values are not looked at. Weights of a
    model of the hub's are downloaded first.
    """
    if not config.trains_itself or config.model.initial_weights is None:
        return []
    folder = Path(config.model.initial_weights).expanduser()
    if not folder.exists() or is_run_or_checkpoint(folder):
        return []
    try:
        fetch_weights(str(folder))
        if not has_weights(folder) and has_pickled_weights(folder):
            return [_pickled(folder)]
        stored = stored_tensors(folder)
    except TrainctlError as error:
        return [_finding(NO_WEIGHTS, error.message, error.hint)]
    if config.model.factory is not None:  # its names are its own
        return []
    return list(_compare(config.model, folder, stored))


def is_run_or_checkpoint(folder: Path) -> bool:
    """Whether weights are taken from one of our own checkpoints, which have a manifest."""
    return (folder / "manifest.json").is_file() or (folder / "checkpoints").is_dir()


def _compare(
    model: ModelConfig, folder: Path, stored: Mapping[str, StoredTensor]
) -> Iterator[Finding]:
    used: set[str] = set()
    missing: list[str] = []
    others: list[str] = []
    unreadable: list[str] = []
    for tensor in all_tensors(model):
        parts = parts_of(tensor.name, tensor.shape, stored)
        if not parts:
            missing.append(tensor.name)
        for part in parts:
            used.add(part.name)
            found = stored[part.name]
            if found.dtype not in READABLE:
                unreadable.append(f"{part.name} in {found.dtype}")
            elif found.shape != part.shape:
                others.append(_differs(tensor, part, found))
    of = f"the weights of {folder} are not {model.name}'s"
    hint = (
        "another model.initial_weights, or model.weights=random; configuration and weights belong "
        "together"
    )
    if missing:
        what = f"{len(missing):,} of its tensors are not there: {_some(missing)}"
        yield _finding(NOT_ITS_WEIGHTS, f"{of}: {what}", _reason(stored) or hint)
    if others:
        yield _finding(NOT_ITS_WEIGHTS, f"{of}: {_some(others)}", hint)
    if unreadable:
        what = f"quantised weights are not read: {_some(unreadable)}"
        yield _finding(
            NOT_ITS_WEIGHTS, f"{folder}: {what}", "a directory of the same model in bf16 or fp32"
        )
    routing = [name for name in stored if name not in used and name.endswith(ROUTING)]
    if routing:
        what = f"a state of its routers that is no parameter: {_some(routing)}"
        yield _finding(
            NOT_ITS_WEIGHTS,
            f"{folder} has {what}; training neither reads nor keeps it, so the model would route "
            "otherwise",
            "model.weights=random",
        )
    left = [name for name in stored if name not in used and not name.endswith(HARMLESS)]
    if left and not (missing or others or unreadable or routing):
        yield Finding(
            rule=LEFT_OVER,
            key="model.initial_weights",
            message=f"{len(left):,} tensors of {folder} have no place in {model.name} and are left "
            f"out: {_some(left)}",
            severity=Severity.warning,
        )


def _differs(tensor: TensorShape, part: StoredPart, found: StoredTensor) -> str:
    sizes = f"{list(found.shape)} in {found.file}, and the model's is {list(part.shape)}"
    return f"{part.name or tensor.name} is {sizes}"


def _reason(stored: Mapping[str, StoredTensor]) -> str:
    """Why tensors may lack that are there under other names."""
    if any(name.endswith(("_blocks", "_scales", "weight_scale_inv", "qweight")) for name in stored):
        return "the files hold quantised weights: a directory of the same model in bf16 or fp32"
    if any(".experts." in name for name in stored):
        return (
            "its experts are stored under names that are not known here: load it in transformers "
            "and save it with save_pretrained, or model.weights=random"
        )
    return ""


def _some(items: list[str]) -> str:
    shown = "; ".join(items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown}; and {len(items) - SHOWN:,} more"


def _pickled(folder: Path) -> Finding:
    return _finding(
        NO_WEIGHTS,
        f"{folder} has its weights in pickled form, which is not read",
        "save them as safetensors (transformers: save_pretrained), or model.weights=random",
    )


def _finding(rule: str, message: str, hint: str) -> Finding:
    return Finding(rule=rule, key="model.initial_weights", message=message, hint=hint)
