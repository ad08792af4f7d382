"""One rank of another loop that trains the same model, batch and DeepSpeed JSON as a trainctl run.

    RANK=0 WORLD_SIZE=1 ... python scripts/benchmarks/peers.py LOOP RUN_DIR RESULT WARMUP

`bare` is a hand-written loop around a DeepSpeed engine, `transformers` its Trainer, and `fsdp2`
torch's `fully_shard` without DeepSpeed. All use the plan, the JSON and the corpus of the run's
first attempt, read the loss at every step as trainctl does, and write their measurements.
`comparison.py` starts them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainctl.data.corpus import Corpus
from trainctl.engines.deepspeed.entry import DeepSpeedBackend
from trainctl.engines.process import Process, stop_process
from trainctl.plans.settings import number_formats
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.train.callbacks.steps import peak_memory
from trainctl.train.data import PackedDataset
from trainctl.train.models.model import TORCH_TYPES, transformers_config


@dataclass
class Clock:
    """Timer between two steps, which includes the device's work."""

    warmup: int
    last: int
    times: list[float] = field(default_factory=list)

    def after(self, step: int) -> None:
        """Record the time if needed; called after every step, counted from 1."""
        if step in (self.warmup, self.last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> float:
        first, last = self.times
        return (last - first) / (self.last - self.warmup)


def bare(plan: RunPlan, settings: dict[str, Any], data: PackedDataset, clock: Clock) -> None:
    """Train in a loop around a DeepSpeed engine."""
    with deepspeed.zero.Init(
        config_dict_or_path=settings, enabled=plan.config.zero_stage.stage == 3
    ):
        model = _model(plan)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    rank, size = torch.distributed.get_rank(), plan.batch.micro_batch_size
    sample = rank * size
    for step in range(1, plan.stop_step + 1):
        for _ in range(plan.batch.gradient_accumulation_steps):
            indices = np.arange(sample, sample + size) % data.num_samples
            ids = data.micro_batch(indices).input_ids.to(engine.device, non_blocking=True)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            sample += size * plan.mesh.data
        loss.item()
        clock.after(step)
    engine.destroy()


def transformers(
    plan: RunPlan, settings: dict[str, Any], data: PackedDataset, clock: Clock
) -> None:
    """Train with transformers' Trainer."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    optimizer, precision = plan.config.optimizer, number_formats(plan.config.precision)
    with tempfile.TemporaryDirectory() as folder:
        # Created before the model: with stage 3 they partition the model as it is built.
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=settings,
            max_steps=plan.stop_step,
            per_device_train_batch_size=plan.batch.micro_batch_size,
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.epsilon,
            max_grad_norm=optimizer.gradient_clipping,
            bf16=precision.weights.value == "bf16",
            use_cpu=plan.hardware.accelerator.value == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )

        class Watch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.after(state.global_step)

        trainer = Trainer(
            model=_model(plan), args=arguments, train_dataset=_Samples(data), callbacks=[Watch()]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.model_wrapped.destroy()


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Single samples, as transformers' Trainer expects them."""

    def __init__(self, data: PackedDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._data.micro_batch(np.array([index])).input_ids[0]
        return {"input_ids": ids, "labels": ids}


def _model(plan: RunPlan, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the plan's model with the given type, or with that of the plan's weights."""
    # A CPU takes a minute to draw a billion weights.
    with torch.device(get_accelerator().current_device_name()):
        model = AutoModelForCausalLM.from_config(
            transformers_config(plan.config.model),
            dtype=dtype or TORCH_TYPES[number_formats(plan.config.precision).weights],
            attn_implementation=plan.config.model.attention.value,
        )
    if plan.config.activation_checkpointing.mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def fsdp2(plan: RunPlan, settings: dict[str, Any], data: PackedDataset, clock: Clock) -> None:
    """Train with torch's `fully_shard`: fp32 master weights, as in DeepSpeed, and torch's fused
    AdamW.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    optimizer, device = plan.config.optimizer, torch.device(get_accelerator().current_device_name())
    low = TORCH_TYPES[number_formats(plan.config.precision).weights]
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    model = _model(plan, torch.float32).to(device)
    partitioned = plan.config.zero_stage.stage == 3
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy, reshard_after_forward=partitioned)
    fully_shard(model, mp_policy=policy, reshard_after_forward=partitioned)
    update = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )
    rank, size = torch.distributed.get_rank(), plan.batch.micro_batch_size
    accumulation, sample = plan.batch.gradient_accumulation_steps, rank * size
    for step in range(1, plan.stop_step + 1):
        for micro in range(accumulation):
            indices = np.arange(sample, sample + size) % data.num_samples
            ids = data.micro_batch(indices).input_ids.to(device, non_blocking=True)
            model.set_requires_gradient_sync(micro == accumulation - 1)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / accumulation).backward()
            sample += size * plan.mesh.data
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.gradient_clipping)
        update.step()
        update.zero_grad()
        loss.item()
        clock.after(step)


LOOPS = {"bare": bare, "transformers": transformers, "fsdp2": fsdp2}


def main(loop: str, run_dir: str, result: str, warmup: str) -> None:
    """Train as one rank, and write seconds per step and peak memory."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    run = RunPaths(Path(run_dir))
    plan = read_plan(run.attempt(1).plan)
    settings = json.loads(run.attempt(1).deepspeed.read_text())
    process: Process = DeepSpeedBackend().start_process(plan)
    corpus = Corpus.load(run.corpus)
    length = plan.batch.sequence_length
    data = PackedDataset(corpus, corpus.train, sequence_length=length, mask_documents=False)
    clock = Clock(int(warmup), plan.stop_step)
    LOOPS[loop](plan, settings, data, clock)
    measured = {
        "seconds_per_step": clock.seconds_per_step,
        **asdict(peak_memory(process.device)),
    }
    Path(f"{result}.{process.rank}").write_text(json.dumps(measured))
    process.barrier()
    stop_process()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(*sys.argv[1:])
