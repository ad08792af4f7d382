"""Small mixtures of experts of several architectures, trained on layouts with an expert axis."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from anatomies import read_directory
from parity_cases import Curve
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from transformers import AutoConfig, AutoModelForCausalLM

from trainctl.config.registry import new_section
from trainctl.config.schema import AttentionKind, ModelConfig, OffloadDevice
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths

STEPS = 6

BLOCKS = 3

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "pad_token_id": 1,
    "router_aux_loss_coef": 0.0,
}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"intermediate_size": 96, **SPARSE},
    "olmoe": {"intermediate_size": 32, **SPARSE},
    "deepseek_v3": {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""Settings that make each architecture small, by transformers' name."""

ADAPTED = ("o_proj", "experts.gate_up_proj", "experts.down_proj")
"""Targets of the adapters of all architectures."""

_DEVICES = {False: OffloadDevice.none, True: OffloadDevice.cpu}

ROUTER_SCALE = 5.0
"""Scale of the routers' weights, so that the load of the experts is uneven."""


def mixture(
    folder: Path, kind: str, *, to_experts: tuple[int, ...] = (), **changes: Any
) -> ModelConfig:
    """Write a model directory with weights.

    Args:
        folder: Created if it is missing.
        to_experts: Experts that all tokens are routed to, where routers have a bias (gpt_oss).
    """
    if not folder.exists():
        torch.manual_seed(5)
        config = AutoConfig.for_model(kind, **(SHAPE | MIXTURES[kind] | changes))
        network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in network.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                torch.nn.init.normal_(parameter, std=0.02 * ROUTER_SCALE)
            if name.endswith("router.bias"):
                parameter.data[list(to_experts)] = 100.0
        network.save_pretrained(folder)
    attention = AttentionKind.eager if kind == "gpt_oss" else AttentionKind.sdpa
    model = ModelConfig(name="hf", family="hf", path=str(folder), attention=attention)
    return read_directory(model)


@dataclass(frozen=True)
class Trial:
    """Mixture on a layout."""

    kind: str
    processes: int = 1
    """Number of processes, all data-parallel except for pipeline stages and tensor ranks."""
    expert: int = 1
    """Expert-parallel size."""
    stage: int = 0
    to_experts: tuple[int, ...] = ()
    """Experts that all tokens are routed to, top-k many; empty leaves the choice to the router."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings, as `tiny_config` takes them; a list is a tuple here."""
    stages: tuple[int, ...] = ()
    """Blocks of each pipeline stage; empty without a pipeline."""
    folded: bool = False
    """Whether each pipeline rank has two of the stages, under DualPipeV."""
    blocks: int = BLOCKS
    """Blocks of the model."""
    tensor: int = 1
    """Tensor-parallel size."""
    adapter: tuple[str, ...] = ()
    """Targets of a LoRA adapter; empty without an adapter."""
    offload: str = "none"
    """Parts in host memory: none, optimizer, or both, which are parameters too."""

    @property
    def reference(self) -> Trial:
        """Return the same model on one process, with the same settings."""
        alone = replace(self, processes=1, expert=1, stage=0, stages=(), folded=False)
        return replace(alone, tensor=1, offload="none")

    @property
    def clipping(self) -> float:
        """Clipping threshold, lower for adapters, whose gradients are smaller."""
        return 0.1 if self.adapter else 0.5

    def plan(self, folder: Path, *, steps: int = STEPS) -> RunPlan:
        """Plan in fp32 with AdamW and a low clipping threshold, so that every step is clipped.

        Args:
            folder: Folder of the model directories.
        """
        lists = {k: [*v] if isinstance(v, tuple) else v for k, v in self.settings}
        config = tiny_config(
            steps=steps,
            sequence_length=48,
            zero_stage__stage=self.stage,
            parallelism__expert=self.expert,
            parallelism__tensor=self.tensor,
            offload__optimizer=_DEVICES[self.offload != "none"],
            offload__parameters=_DEVICES[self.offload == "both"],
            parallelism__pipeline=max(1, len(self.stages) // (2 if self.folded else 1)),
            parallelism__pipeline_schedule="dualpipev" if self.folded else "1f1b",
            parallelism__stage_blocks=list(self.stages),
            optimizer__lr=1e-3,
            optimizer__gradient_clipping=self.clipping,
            checkpoint__at_end=bool(self.adapter),
            **{"precision__compute": "fp32", **lists},
        )
        name = "-".join([f"{self.kind}-{self.blocks}", *map(str, self.to_experts)])
        if self.adapter:
            config.adapter = new_section("adapter", "lora", rank=8, targets=list(self.adapter))
            config.optimizer.lr = 5e-3
        top = {"num_experts_per_tok": len(self.to_experts)} if self.to_experts else {}
        top["num_hidden_layers"] = self.blocks
        config.model = mixture(folder / name, self.kind, to_experts=self.to_experts, **top)
        return tiny_plan(config, self.processes)

    def train(self, folder: Path, *, steps: int = STEPS) -> Curve:
        """Train; return loss and gradient norm by step."""
        return curve(train_all([self], folder, steps=steps)[self])


def train_all(
    trials: Iterable[Trial], folder: Path, *, steps: int = STEPS
) -> dict[Trial, RunPaths]:
    """Train all and return their runs; trials of one world size share their processes."""
    runs = {trial: RunPaths(Path(tempfile.mkdtemp(dir=folder))) for trial in trials}
    for size in sorted({trial.processes for trial in runs}):
        cases = [
            Case(trial.plan(folder, steps=steps), run)
            for trial, run in runs.items()
            if trial.processes == size
        ]
        train_cases(size, cases, together=True)
    return runs
