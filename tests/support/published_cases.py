"""Published models, each read from its `config.json` and traced in the calling process."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anatomies import read_directory
from transformers import AutoConfig

from trainctl.config.schema import AttentionKind, ModelConfig, RunConfig, TrainingConfig
from trainctl.memory.traced import TracedModel

FOLDER = Path(__file__).parents[1] / "memory" / "published"
CASES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))
}


def directory(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model's `config.json` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CASES[name], **changes}))
    return folder


@cache
def composed(name: str) -> RunConfig:
    """Return a run of the model in bf16, with a freshly read anatomy."""
    with TemporaryDirectory() as folder:
        model = ModelConfig(name=name, family="hf", path=str(directory(name, Path(folder))))
        model = read_directory(model)
        if AttentionKind.sdpa.value not in model.anatomy[0].split():
            model = replace(model, attention=AttentionKind.eager)
        return RunConfig(model=model)


def traced(config: RunConfig, sequence_length: int) -> TracedModel:
    """Trace the model without a cache."""
    from trainctl.train.models.trace import trace

    with TemporaryDirectory() as folder:
        path = directory(config.model.name, Path(folder))
        model = replace(config.model, path=str(path))
        training = TrainingConfig(sequence_length=sequence_length)
        return trace(replace(config, model=model, training=training))


def resaved(name: str) -> dict[str, Any]:
    """Return the model's `config.json` as transformers would save it."""
    with TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(directory(name, Path(folder)))
    loaded: dict[str, Any] = json.loads(config.to_json_string())
    return loaded
