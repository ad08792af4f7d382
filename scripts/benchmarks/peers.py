"""Other training loops that train the model and batch of a trainctl plan, each at its best.

All decoder blocks are compiled where a loop allows it, AdamW is fused, the loss is not read at
every step, and DeepSpeed does not check gradients for overflow in bf16. `gpu_check.py` calls them
in a process of their own, which is the only rank.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch._dynamo  # its import fails inside `zero.Init`, which replaces `Tensor.__new__`
from benchmarks.meter import Meter
from deepspeed.accelerator import get_accelerator
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainctl.plans.settings import number_formats
from trainctl.plans.types import RunPlan
from trainctl.train.models.model import TORCH_TYPES, transformers_config

Loop = Callable[[RunPlan, Meter], None]

DOCUMENT_TOKENS = 512
"""Tokens of each document in the masked loops."""


def bare_compiled(plan: RunPlan, meter: Meter) -> None:
    """Train in a loop around a DeepSpeed engine, with compiled blocks."""
    model = make_model(plan)
    for block in model.model.layers:
        block.compile()
    _train_bare(plan, meter, model)


def bare_partitioned(plan: RunPlan, meter: Meter) -> None:
    """Train in a loop around a DeepSpeed engine of ZeRO 3, which gathers module by module."""
    with deepspeed.zero.Init(config_dict_or_path=_settings(plan)):
        model = make_model(plan)
    _train_bare(plan, meter, model)


def bare_leaf_blocks(plan: RunPlan, meter: Meter) -> None:
    """Train in a loop around a DeepSpeed engine of ZeRO 3, which gathers block by block."""
    with deepspeed.zero.Init(config_dict_or_path=_settings(plan)):
        model = make_model(plan)
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
    _train_bare(plan, meter, model)


def bare_masked(plan: RunPlan, meter: Meter) -> None:
    """Train as `bare_compiled`, with documents kept apart by a mask of all pairs of tokens."""
    documents = _document_numbers(plan)
    causal = torch.ones(len(documents), len(documents), dtype=torch.bool).tril()
    mask = causal & (documents == documents[:, None])
    shape = (plan.batch.micro_batch_size, 1, *mask.shape)
    mask = mask.to(get_accelerator().current_device_name()).expand(shape)
    _train_masked(plan, meter, "sdpa", attention_mask=mask)


def bare_varlen(plan: RunPlan, meter: Meter) -> None:
    """Train as `bare_compiled`, with documents kept apart by torch's kernel for such lengths."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    counts = torch.bincount(_document_numbers(plan)).repeat(plan.batch.micro_batch_size)
    bounds = functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    bounds, longest = bounds.to(get_accelerator().current_device_name()), int(counts.max())
    is_new = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if is_new else {"is_causal": True}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        samples, heads, length, width = query.shape
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
        flat = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        attended = varlen_attn(*flat, bounds, bounds, longest, longest, **causal)
        return attended.view(samples, length, heads, width), None

    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)
    _train_masked(plan, meter, "varlen")


def _train_masked(plan: RunPlan, meter: Meter, attention: str, **inputs: torch.Tensor) -> None:
    model = make_model(plan, attention=attention)
    for block in model.model.layers:
        block.compile()
    length = plan.batch.sequence_length
    positions = torch.arange(length) % min(DOCUMENT_TOKENS, length)
    positions = positions.to(get_accelerator().current_device_name())[None]
    positions = positions.expand(plan.batch.micro_batch_size, -1)
    _train_bare(plan, meter, model, position_ids=positions, **inputs)


def _document_numbers(plan: RunPlan) -> torch.Tensor:
    """Return the number of the document that each token of a sample belongs to."""
    return torch.arange(plan.batch.sequence_length) // DOCUMENT_TOKENS


def _train_bare(
    plan: RunPlan, meter: Meter, model: PreTrainedModel, **inputs: torch.Tensor
) -> None:
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_settings(plan)
    )
    ids = sample_ids(plan)
    for _ in range(meter.steps.total):
        loss = engine(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        engine.backward(loss)
        engine.step()
        meter.after_step()
    check_loss(loss)


def torchtitan(plan: RunPlan, meter: Meter) -> None:
    """Train as torchtitan does: compiled blocks and loss, `fully_shard` with fp32 master weights in
    mixed precision, fused AdamW.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    optimizer = plan.config.optimizer
    low = TORCH_TYPES[number_formats(plan.config.precision).weights]
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    model, ids = make_model(plan, torch.float32), sample_ids(plan)
    for block in model.model.layers:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    cross_entropy = torch.compile(_cross_entropy)
    update = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )
    for _ in range(meter.steps.total):
        loss = cross_entropy(model(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), optimizer.gradient_clipping, foreach=True
        )
        update.step()
        update.zero_grad()
        meter.after_step()
    check_loss(loss)


def _cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def transformers(plan: RunPlan, meter: Meter) -> None:
    """Train with transformers' Trainer around DeepSpeed, with Liger's kernels if installed."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import is_liger_kernel_available

    optimizer, precision = plan.config.optimizer, number_formats(plan.config.precision)
    is_on_cpu = plan.hardware.accelerator.value == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=_settings(plan),
            max_steps=meter.steps.total,
            per_device_train_batch_size=plan.batch.micro_batch_size,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.epsilon,
            max_grad_norm=optimizer.gradient_clipping,
            bf16=precision.weights.value == "bf16",
            use_cpu=is_on_cpu,
            use_liger_kernel=is_liger_kernel_available() and not is_on_cpu,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )

        class Watch(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                meter.after_step()

        rows = sample_ids(plan).cpu()
        data: Any = [{"input_ids": row, "labels": row} for row in rows] * meter.steps.total
        trainer = Trainer(
            model=make_model(plan), args=arguments, train_dataset=data, callbacks=[Watch()]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def make_model(
    plan: RunPlan, dtype: torch.dtype | None = None, attention: str = "sdpa"
) -> PreTrainedModel:
    """Build the plan's model with the given type, or with that of the plan's weights."""
    # A CPU takes a minute to draw a billion weights.
    with torch.device(get_accelerator().current_device_name()):
        return AutoModelForCausalLM.from_config(
            transformers_config(plan.config.model),
            dtype=dtype or TORCH_TYPES[number_formats(plan.config.precision).weights],
            attn_implementation=attention,
        )


def sample_ids(plan: RunPlan) -> torch.Tensor:
    """Return random token ids of a micro-batch, on the device."""
    batch, vocabulary = plan.batch, plan.config.model.vocab_size
    ids = torch.randint(vocabulary, (batch.micro_batch_size, batch.sequence_length))
    return ids.to(get_accelerator().current_device_name())


def check_loss(loss: torch.Tensor) -> None:
    """Raise ValueError if a loss is not finite: such a loop may have skipped its updates."""
    if not torch.isfinite(loss):
        raise ValueError(f"the loss became {loss.item()}")


def _settings(plan: RunPlan) -> dict[str, Any]:
    settings = copy.deepcopy(dict(plan.deepspeed))
    settings["bf16"] = {"enabled": settings.get("bf16", {}).get("enabled", False)}
    return settings


LOOPS: dict[str, Loop] = {
    "bare-compiled": bare_compiled,
    "bare": bare_partitioned,
    "bare-leaf-blocks": bare_leaf_blocks,
    "bare-masked": bare_masked,
    "bare-varlen": bare_varlen,
    "torchtitan": torchtitan,
    "transformers": transformers,
}
