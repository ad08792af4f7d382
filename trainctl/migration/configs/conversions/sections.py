"""Sections that several programs have: data, the shape of a model in numbers, and the optimizer.

Data are files, URLs and datasets of the hub, as one source or a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.errors import Finding
from trainctl.migration.configs.import_table import Conversion
from trainctl.models.directory import is_hub_name
from trainctl.models.local_path import is_there

HUB = "hf://datasets/"
"""Protocol of the hub's datasets (docs/data.md)."""


FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".zst")
"""Endings that a file of data has, and a name on the hub has not."""


@dataclass
class DataPart:
    """One source of the data."""

    kind: str
    """Option of the group `data`."""
    paths: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    """Further keys of the kind."""


def place(source: Conversion, path: Any, files: Any = None, revision: Any = None) -> list[str]:
    """Return the paths or URLs of a dataset: a local file or folder, or a name on the hub.

    Args:
        files: Names of files in it; None means all of them.
        revision: Branch, tag or commit on the hub.
    """
    if not isinstance(path, str) or not path:
        return []
    names = [files] if isinstance(files, str) else files if isinstance(files, list) else []
    names = [str(each) for each in names if each]
    is_file = Path(path).suffix in FILE_ENDINGS
    is_local = is_file or is_there(source.locate(path)) or not is_hub_name(path)
    if path in ("json", "jsonl", "parquet", "text", "csv", "arrow") and names:
        return names  # a format of `datasets`, whose files are listed
    root = path if is_local or "://" in path else f"{HUB}{path}{f'@{revision}' if revision else ''}"
    return [join(root, name) for name in names] or [root]


def join(folder: str, name: str) -> str:
    """Return the path of a file in a folder, or its URL in a store; an absolute one stays."""
    return name if name.startswith("/") or "://" in name else f"{folder.rstrip('/')}/{name}"


def choose_data(source: Conversion, parts: list[DataPart], *, epochs: str) -> None:
    """Set the data: one source if all parts are of one kind, else a mixture of whole sources.

    Args:
        epochs: Key of the source with the number of passes, which a mixture has for each part.
    """
    if not parts:
        return
    first = parts[0]
    if all((part.kind, part.keys) == (first.kind, first.keys) for part in parts):
        source.set("data", first.kind)
        source.set("data.paths", [path for part in parts for path in part.paths])
        held_out = [path for part in parts for path in part.held_out]
        if held_out:
            source.set("data.held_out_paths", held_out)
        for name, value in first.keys.items():
            source.set(f"data.{name}", value)
        return
    passes = source.converted.settings.pop("training.epochs", None)
    if passes is not None:
        source.leave(epochs, "a mixture has passes of each source", "training.tokens=1B")
    share = {"weight": 1.0} if passes is None else {"epochs": passes}
    source.set("data", first.kind)
    source.set(
        "data.sources",
        {
            f"part_{number}": {
                "kind": part.kind,
                "paths": part.paths,
                **({"held_out_paths": part.held_out} if part.held_out else {}),
                **share,
                **part.keys,
            }
            for number, part in enumerate(parts, 1)
        },
    )


FAMILIES = {
    "llama": "llama-7b",
    "mistral": "mistral-7b",
    "qwen3": "qwen3-8b",
    "gpt2": "gpt2-124m",
}
"""Option of the group `model` whose keys a family's shape replaces."""


def set_shape(source: Conversion, family: str, shape: Mapping[str, Any], name: str) -> None:
    """Choose a family and set its shape.

    Args:
        family: One of `FAMILIES`.
        shape: Values of keys of the section `model`; all that the family's option has, or the
            option's own would be invented.
        name: Key of the source that the choice comes from.
    """
    source.set("model", FAMILIES[family], name)
    for key, value in shape.items():
        source.set(f"model.{key}", value)


def missing_vocabulary(source: Conversion, why: str) -> None:
    """Record that the size of the vocabulary must be given."""
    source.findings.append(
        Finding(
            rule="TC102",
            key="model.vocab_size",
            message=f"the source does not say how large the vocabulary is: {why}",
            hint="model.vocab_size=N",
        )
    )


SAME_OPTIMIZERS = {
    "adamw": "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf adamw "
    "adamw_apex_fused adamw_anyprecision paged_adamw paged_adamw_32bit optimi_adamw flash_adamw",
    "adamw_8bit": "adamw_bnb_8bit adamw_8bit paged_adamw_8bit adamw_torch_8bit ao_adamw_8bit",
    "lion": "lion lion_32bit paged_lion_32bit paged_lion flash_lion",
    "sgd": "sgd flash_sgd",
    "muon": "muon",
}
"""Options of the group `optimizer`, each with the names that it has elsewhere."""

NEAR_OPTIMIZERS = {
    "adafactor": "adafactor",
    "lion_8bit": "lion",
    "paged_lion_8bit": "lion",
    "adamw_torch_4bit": "adamw_8bit",
    "ao_adamw_4bit": "adamw_8bit",
    "ao_adamw_fp8": "adamw_8bit",
    "q_galore_adamw8bit": "adamw_8bit",
    "dion": "muon",
}
"""Nearest options of optimizers that there are not; of all others it is AdamW."""

WHY_NO_OPTIMIZER = {
    "adafactor": "its learning rate is absolute there and relative to the parameters here",
    "lion_8bit": "its state has 8 bits there",
    "paged_lion_8bit": "its state has 8 bits there",
}


def choose_optimizer(source: Conversion, name: str) -> str:
    """Convert the optimizer that the key `name` of a source names, and return its option."""
    theirs = str(source.get(name)).lower()
    ours = next(
        (option for option, names in SAME_OPTIMIZERS.items() if theirs in names.split()), ""
    )
    if not ours:
        nearest = NEAR_OPTIMIZERS.get(theirs, "adamw")
        reason = WHY_NO_OPTIMIZER.get(theirs, f"there is no optimizer {theirs}")
        source.leave(name, reason, f"optimizer={nearest}")
        source.set("optimizer", "adamw")
        return "adamw"
    source.set("optimizer", ours, name)
    if ours == "sgd":
        source.set("optimizer.momentum", 0.0)
    if ours == "muon":
        source.set("optimizer.matrix_lr", None)
    return ours
