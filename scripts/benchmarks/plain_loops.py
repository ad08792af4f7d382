"""One rank of a hand-written training loop that uses nothing of trainctl.

    torchrun --nproc-per-node 2 scripts/benchmarks/plain_loops.py {bare,transformers,fsdp2} JOB

`bare` is a loop around a DeepSpeed engine, `transformers` its Trainer with the same JSON, `fsdp2`
torch's `fully_shard` with a checkpoint by `torch.distributed.checkpoint`. `cpu_loops.py` writes
JOB. Each loop reads the loss at every step and saves after the last one. The first rank writes the
end time of each step (seconds since the epoch) and the duration of the save.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # its import fails inside `zero.Init`, which replaces `Tensor.__new__`
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM


class Measured:
    """End time of each step, and duration of the save."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.save_seconds = 0.0

    def stepped(self) -> None:
        self.times.append(time.time())

    def write(self, job: dict[str, Any]) -> None:
        if int(os.environ["RANK"]) == 0:
            Path(job["result"]).write_text(json.dumps(vars(self)))


def batches(job: dict[str, Any], first: int) -> Iterator[list[torch.Tensor]]:
    """Yield this rank's micro-batches of each step after `first`."""
    rank, world, size = dist.get_rank(), dist.get_world_size(), job["micro_batch_size"]
    ids = np.load(job["ids"], mmap_mode="r")
    for step in range(first, job["steps"]):
        rows = [
            (step * job["accumulation"] + micro) * world * size + rank * size
            for micro in range(job["accumulation"])
        ]
        yield [torch.from_numpy(ids[row : row + size].astype(np.int64)) for row in rows]


def model_of(job: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**job["model"])
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job["dtype"]))


def bare(job: dict[str, Any], measured: Measured) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    settings = job["deepspeed"]
    with deepspeed.zero.Init(
        config_dict_or_path=settings, enabled=settings["zero_optimization"]["stage"] == 3
    ):
        model = model_of(job)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    first = 0
    if job["resumes"]:
        _, state = engine.load_checkpoint(job["checkpoints"])
        first = state["step"]
    for micro_batches in batches(job, first):
        for ids in micro_batches:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        loss.item()
        measured.stepped()
    began = time.perf_counter()
    engine.save_checkpoint(job["checkpoints"], client_state={"step": job["steps"]})
    measured.save_seconds = time.perf_counter() - began


def transformers(job: dict[str, Any], measured: Measured) -> None:
    import deepspeed
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __init__(self) -> None:
            self.ids = np.load(job["ids"], mmap_mode="r")

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.from_numpy(self.ids[index].astype(np.int64))
            return {"input_ids": ids, "labels": ids}

    class Timed(Trainer):
        def _save_checkpoint(self, *arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            saved = super()._save_checkpoint(*arguments, **more)
            measured.save_seconds = time.perf_counter() - began
            return saved

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            measured.stepped()

    # Created before the model: with stage 3 they partition the model as it is built.
    arguments = TrainingArguments(
        output_dir=job["checkpoints"],
        deepspeed=job["deepspeed"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=job["accumulation"],
        learning_rate=job["lr"],
        weight_decay=job["weight_decay"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["epsilon"],
        max_grad_norm=job["clip"],
        use_cpu=True,
        logging_steps=1,
        save_strategy="steps",
        save_steps=job["steps"],
        report_to=[],
        disable_tqdm=True,
    )
    deepspeed.init_distributed("gloo")  # only on a CPU must the Trainer be told
    trainer = Timed(
        model=model_of(job), args=arguments, train_dataset=Samples(), callbacks=[Watch()]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=job["resumes"] or None)


def fsdp2(job: dict[str, Any], measured: Measured) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = model_of(job)
    reshard = job["deepspeed"]["zero_optimization"]["stage"] == 3
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=job["lr"],
        betas=job["betas"],
        eps=job["epsilon"],
        weight_decay=job["weight_decay"],
    )

    def state() -> dict[str, Any]:
        weights, optimized = get_state_dict(model, optimizer)
        return {"weights": weights, "optimizer": optimized, "step": torch.tensor(job["steps"])}

    first = 0
    if job["resumes"]:
        loaded = state()
        checkpoint.load(loaded, checkpoint_id=job["checkpoints"])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["weights"],
            optim_state_dict=loaded["optimizer"],
        )
        first = int(loaded["step"])
    for micro_batches in batches(job, first):
        for index, ids in enumerate(micro_batches):
            model.set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip"])
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        measured.stepped()
    began = time.perf_counter()
    checkpoint.save(state(), checkpoint_id=job["checkpoints"])
    measured.save_seconds = time.perf_counter() - began


LOOPS = {"bare": bare, "transformers": transformers, "fsdp2": fsdp2}


def main(loop: str, job: str) -> None:
    """Train as one rank."""
    description, measured = json.loads(Path(job).read_text()), Measured()
    LOOPS[loop](description, measured)
    measured.write(description)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(*sys.argv[1:])
