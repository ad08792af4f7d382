"""Checkpoints that Megatron-core's own code trained and saved, continued by trainctl.

Megatron-core trains three models on two processes to step 6, saves after step 3, and is the
reference: trainctl imports, and continues on other layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import foreign_tools
import numpy as np
from fork_server import ForkServer
from megatron_model import MegatronCase, MegatronResult
from rank_processes import (
    ENVIRONMENT,
    Case,
    curve,
    prepare_once,
    tiny_config,
    tiny_plan,
    train_cases,
)

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.migration.checkpoints.source import open_source
from trainctl.migration.checkpoints.write import ImportedCheckpoint, import_source
from trainctl.runs.layout import RunPaths

SAVED, STEPS, BATCH, TOKENS, ROWS = 3, 6, 8, 64, 384
SECONDS = 300.0

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "gpt2": {"family": "gpt2", "tie_word_embeddings": True, "num_key_value_heads": None},
}
"""Keys of each model here."""

SAVES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tensor": 2},
    "qwen3": {"qk_norms": True, "is_tied": True, "sharding": None},
    "gpt2": {"is_gpt2": True, "is_tied": True, "numbered": True},
    "buckets": {"sharding": "dp_reshardable", "steps": SAVED},
}
"""Each model there, with the form of its checkpoint."""


@dataclass(frozen=True)
class Trained:
    """A training by Megatron-core."""

    folder: Path
    result: MegatronResult


def configuration(family: str, **changes: Any) -> RunConfig:
    """Return the configuration of what `megatron_model` trains."""
    config = tiny_config(
        steps=STEPS,
        sequence_length=TOKENS,
        evaluation_samples=0,
        sample_tokens=0,
        optimizer__lr=1e-3,
        optimizer__decay_embeddings=True,
        optimizer__gradient_clipping=1.0,
        **changes,
    )
    config.model = ModelConfig(
        vocab_size=ROWS,
        hidden_size=32,
        intermediate_size=128 if family == "gpt2" else 48,
        num_layers=2,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=TOKENS,
        norm_epsilon=1e-5,
        **{"num_key_value_heads": 2, **FAMILIES[family]},
    )
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    config.checkpoint.at_end = False
    return config


def train_there(folder: Path) -> dict[str, Trained]:
    """Train all models of `SAVES` with Megatron-core on two processes."""
    case = Case(tiny_plan(configuration("llama"), 1), RunPaths(folder / "samples"))
    case.run.attempt(1).root.mkdir(parents=True)
    prepare_once(case.plan, case.run)
    samples, _ = foreign_tools.samples(foreign_tools.Training(case, "megatron", ()), STEPS)
    np.save(folder / "samples.npy", samples.numpy())
    base = MegatronCase(
        folder=folder, samples=folder / "samples.npy", steps=STEPS, save_at=SAVED, batch=BATCH
    )
    cases = [replace(base, folder=folder / name, **keys) for name, keys in SAVES.items()]
    with ForkServer(("megatron_model",), {**ENVIRONMENT, "PYTHONWARNINGS": "ignore"}) as server:
        results = server.run("megatron_model:train", cases, 2, SECONDS)[0]
    return {
        name: Trained(case.folder, result)
        for name, case, result in zip(SAVES, cases, results, strict=True)
    }


@dataclass(frozen=True)
class Continued:
    """A training of Megatron-core that trainctl continued."""

    imported: ImportedCheckpoint
    difference: float
    """Largest difference of a loss from Megatron-core's own, in nats."""


def continue_here(
    folder: Path,
    trained: Mapping[str, Trained],
    layouts: Sequence[tuple[str, int, Mapping[str, Any]]],
) -> list[Continued]:
    """Import checkpoints and train to the end.

    Args:
        layouts: Model, processes and keys of the configuration, of each run.
    """
    imported, cases = [], []
    for index, (family, processes, keys) in enumerate(layouts):
        plan = tiny_plan(configuration(family, **keys), processes)
        run = RunPaths(folder / f"{family}-{index}")
        imported.append(import_source(open_source(trained[family].folder), plan, run.root))
        cases.append(Case(plan, run, attempt=2))
    for size in {processes for _, processes, _ in layouts}:
        some = [c for c, (_, count, _) in zip(cases, layouts, strict=True) if count == size]
        train_cases(size, some, together=True)
    found = []
    for made, case, (family, _, _) in zip(imported, cases, layouts, strict=True):
        losses, there = curve(case.run), trained[family].result.losses
        assert list(losses) == list(range(SAVED + 1, STEPS + 1)), losses
        found.append(Continued(made, max(abs(losses[s][0] - there[s]) for s in losses)))
    return found
