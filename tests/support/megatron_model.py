"""A small GPT of Megatron-core, trained and saved by its own code on CPU processes.

Megatron-core names CUDA wherever it makes a tensor and knows its parameters' types by CUDA's names.
`OnCpu` answers both, so that its layers, its distributed optimizer and its checkpoints run
unchanged over gloo. Its random number generators on the device are left out: nothing here draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import random as device_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.overrides import TorchFunctionMode

PRELOAD = ("megatron_model",)


@dataclass(frozen=True, kw_only=True)
class MegatronCase:
    """A training of the model."""

    folder: Path
    """Folder that Megatron-LM would be told to save in."""
    samples: Path
    """Token ids, (samples, tokens + 1) of int64, in the order in which they are trained on."""
    steps: int
    save_at: int
    batch: int = 8
    """Samples of a step."""
    tensor: int = 1
    """Tensor-parallel processes; the others are data-parallel."""
    sharding: str | None = "fully_reshardable"
    """Format of the distributed optimizer's states; None takes the optimizer that every rank holds.
    """
    is_tied: bool = False
    is_gpt2: bool = False
    """Layer norms, biases, learned positions and GELU, in place of the Llama's."""
    qk_norms: bool = False
    vocabulary: int = 384
    """Rows of the embedding, padding included."""
    layers: int = 2
    numbered: bool = False
    """Save each layer by its number, as models with unequal layers are saved."""
    lr: float = 1e-3
    weight_decay: float = 0.1


@dataclass(frozen=True)
class MegatronResult:
    """Losses by step, and logits of the weights saved."""

    losses: Mapping[int, float]
    ids: torch.Tensor
    """Token ids that the logits are of, (batch, tokens)."""
    logits: torch.Tensor
    """(batch, tokens, vocabulary)."""


class OnCpu(TorchFunctionMode):
    """Make what is asked of CUDA on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, on the CPU."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class _NoGenerators:
    """Stand-in of the generators for regions that tensor ranks draw in."""

    @contextlib.contextmanager
    def fork(self, *names: str) -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return True


def train(cases: Sequence[MegatronCase]) -> list[MegatronResult]:
    """Train the cases one after the other, on every process of the world together."""
    dist.init_process_group("gloo")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    device_random._CUDA_RNG_STATE_TRACKER = _NoGenerators()
    device_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    results = []
    for case in cases:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.tensor)
        with OnCpu():
            results.append(_train(case))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return results


def _train(case: MegatronCase) -> MegatronResult:
    torch.manual_seed(5)
    config = _transformer(case)
    samples = torch.from_numpy(np.load(case.samples))
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            normalization=config.normalization, qk_layernorm=config.qk_layernorm
        ),
        vocab_size=case.vocabulary,
        max_sequence_length=samples.shape[1] - 1,
        position_embedding_type="learned_absolute" if case.is_gpt2 else "rope",
        share_embeddings_and_output_weights=case.is_tied,
    )
    for parameter in model.parameters():  # neither zero nor one, or a fault would not show
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    ranks = DistributedDataParallelConfig(use_distributed_optimizer=case.sharding is not None)
    wrapped = DistributedDataParallel(config, ranks, model)
    optimizer = get_megatron_optimizer(_optimizer(case), [wrapped])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=case.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=case.steps * case.batch,
        lr_decay_style="constant",
        start_wd=case.weight_decay,
        end_wd=case.weight_decay,
        wd_incr_steps=case.steps * case.batch,
        wd_incr_style="constant",
    )
    scheduler.step(0)
    losses, ids = {}, samples[: case.batch, :-1]
    for step in range(1, case.steps + 1):
        losses[step] = _step(case, wrapped, optimizer, samples[(step - 1) * case.batch :])
        scheduler.step(case.batch)
        if step == case.save_at:
            _save(case, model, optimizer, scheduler)
            logits = _whole_logits(_forward(model, ids).detach())
    return MegatronResult(losses, ids, logits)


def _step(case: MegatronCase, model: Any, optimizer: Any, samples: torch.Tensor) -> float:
    """Train on a batch, shared out over the data ranks; return its mean loss."""
    group = parallel_state.get_data_parallel_group()
    rank, size = group.rank(), group.size()
    own = samples[: case.batch][rank::size]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = _forward(model, own[:, :-1], labels=own[:, 1:].contiguous()).mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    total = loss.detach().double()
    dist.all_reduce(total, group=group)
    return float(total) / size


def _whole_logits(own: torch.Tensor) -> torch.Tensor:
    """Join the logits of the tensor ranks, each of which has a part of the vocabulary."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _forward(model: Any, ids: torch.Tensor, **labels: torch.Tensor) -> torch.Tensor:
    tokens = ids.shape[1]
    positions = torch.arange(tokens)[None].expand_as(ids)
    later = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), 1)[None, None]
    result: torch.Tensor = model(ids, positions, later, **labels)
    return result


def _transformer(case: MegatronCase) -> TransformerConfig:
    style: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
    }
    if case.is_gpt2:
        style = {
            "normalization": "LayerNorm",
            "activation_func": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            "ffn_hidden_size": 128,
        }
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=32,
        num_attention_heads=4,
        layernorm_epsilon=1e-5,
        qk_layernorm=case.qk_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=case.tensor,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **style,
    )


def _adam(case: MegatronCase) -> dict[str, Any]:
    """Return what both the optimizer and the arguments in a checkpoint say."""
    return {
        "optimizer": "adam",
        "lr": case.lr,
        "weight_decay": case.weight_decay,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
        "use_distributed_optimizer": case.sharding is not None,
    }


def _optimizer(case: MegatronCase) -> OptimizerConfig:
    return OptimizerConfig(**_adam(case))


def _save(case: MegatronCase, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Save as Megatron-LM does (`--ckpt-format torch_dist`): state, arguments and tracker file."""
    folder = case.folder / f"iter_{case.save_at:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    content: dict[str, Any] = {
        "distrib_optim_sharding_type": case.sharding,
        "non_homogeneous_layers": case.numbered,
    }
    metadata = ensure_metadata_has_dp_cp_group(dict(content))
    weights = model.sharded_state_dict(metadata=metadata)
    dist_checkpointing.save(
        {
            "args": _arguments(case, model.config),
            "checkpoint_version": 3.0,
            "iteration": case.save_at,
            "num_floating_point_operations_so_far": 1e9,
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
            "opt_param_scheduler": scheduler.state_dict(),
        },
        str(folder),
        content_metadata=content,
    )
    if dist.get_rank() == 0:
        (case.folder / "latest_checkpointed_iteration.txt").write_text(str(case.save_at))
    dist.barrier()


def _arguments(case: MegatronCase, config: Any) -> Namespace:
    """Return the arguments of its command line that Megatron-LM saves (training/arguments.py)."""
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    plain = {
        name: value for name, value in fields.items() if type(value) in (int, float, bool, str)
    }
    return Namespace(
        **plain,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.local,
        params_dtype=torch.float32,
        swiglu=not case.is_gpt2,
        norm_epsilon=config.layernorm_epsilon,
        group_query_attention=not case.is_gpt2,
        untie_embeddings_and_output_weights=not case.is_tied,
        padded_vocab_size=case.vocabulary,
        position_embedding_type="learned_absolute" if case.is_gpt2 else "rope",
        max_position_embeddings=64,
        rotary_base=10000,
        rotary_percent=1.0,
        apply_layernorm_1p=False,
        seq_length=64,
        global_batch_size=case.batch,
        consumed_train_samples=case.save_at * case.batch,
        **_adam(case),
    )
