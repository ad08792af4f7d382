"""The model: built by transformers from the plan's shape, and filled with weights afterwards.

transformers' parameter names are the canonical names, which initialisation, decay groups,
checkpoints and exports all use. `trainctl.plans.mup` has the table of muP's multipliers, which are
applied here and folded into exports.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.config.registry import function_of
from trainctl.config.schema import AttentionKind, DataType, ModelConfig
from trainctl.data import user_functions as user_code
from trainctl.data.user_functions import load_user_function
from trainctl.engines.protocol import MakeParameter
from trainctl.engines.shards import ParameterPiece, Pieces, Read, Shard, read_shard
from trainctl.errors import TrainctlError
from trainctl.models.hf_weights import Buffer, output_layer, persistent_buffers
from trainctl.models.tensors import FUTURE
from trainctl.options.model import Family, families, family_of_type, spec_of
from trainctl.plans.mup import multipliers
from trainctl.plans.shapes import final_norm_tensors, head_dim, key_value_heads
from trainctl.train.models.encoders import auto_class, separate_documents
from trainctl.train.models.future import add_future_blocks
from trainctl.train.models.module import ModuleModel, adapt_module
from trainctl.train.models.weights import SkipInit, WeightSource
from trainctl.train.parallel.experts import compute_in_fp32

TORCH_TYPES = {
    DataType.fp32: torch.float32,
    DataType.bf16: torch.bfloat16,
    DataType.fp16: torch.float16,
}


def transformers_config(model: ModelConfig) -> PretrainedConfig:
    """Return the transformers config of a model, made by its family."""
    made: PretrainedConfig = function_of("model", model.family)(model)
    if model.score_outputs is not None and made.num_labels != model.score_outputs:
        made.num_labels = model.score_outputs
    return made


def directory_config(model: ModelConfig) -> PretrainedConfig:
    """Return the transformers config in the model's directory, whatever the shape says."""
    return AutoConfig.from_pretrained(
        model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
    )


def shape_config(model: ModelConfig) -> PretrainedConfig:
    """Return the transformers config of a shape, in the argument names of its family."""
    spec = spec_of(model)
    keys = {item.name: getattr(model, item.name) for item in fields(model)}
    keys |= {"num_key_value_heads": key_value_heads(model), "head_dim": head_dim(model)}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}}
    return CONFIG_MAPPING[spec.name](
        **{theirs: keys[ours] for ours, theirs in spec.arguments.items()},
        **{name: keys[name] for name in model.own_keys},
        **(rotary if spec.is_rotary else {}),
        **spec.settings,
        use_cache=False,
        # The byte tokenizer has none of these, and transformers' defaults may lie outside its ids.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def skeleton(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the module tree with real buffers and with its parameters on the meta device.

    No rank holds a weight yet, whatever the model's size; `materialise` fills them in.
    """
    if model.is_module:
        built = factory_model(model, dtype, on_meta=True)
    else:
        with parameters_on_meta(), SkipInit():
            if model.factory is None:
                shape = transformers_config(model)
                built = transformers_model(model, shape, dtype, model.attention.value)
            else:
                built = factory_model(model, dtype)
            if model.future_blocks is not None:
                add_future_blocks(built, spec_of(model), model.future_blocks)
                getattr(built, FUTURE).to(dtype)
    built.tie_weights()
    separate_documents(built)
    for buffer in persistent_buffers(built):  # state stays in fp32 as published: a router's bias
        if buffer.tensor.is_floating_point():
            setattr(buffer.module, buffer.key, buffer.tensor.float())
    apply_multipliers(built, model)
    if dtype is not torch.float32:
        compute_in_fp32(built)
    built.train()
    return built


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class; of a user's module, its own."""
    return type(model.module if isinstance(model, ModuleModel) else model).__name__


def require_all_to_train(model: nn.Module) -> None:
    """Refuse a model with frozen parameters, before training starts.

    Either the optimizer would still decay them, or DeepSpeed leaves them out of its own
    tensors; then every checkpoint lacks them, and none can be read again.

    Raises:
        TrainctlError: Some parameters have `requires_grad` off; names the first.
    """
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        raise TrainctlError(
            f"{class_name(model)} has parameters that do not train ({frozen[0]}{more}), which "
            "checkpoints would lack",
            hint="in a model of your own leave requires_grad on, or make them persistent buffers; "
            "optimizer.groups with a small lr_factor holds parameters almost still",
        )


def transformers_model(
    model: ModelConfig, config: PretrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Return the model that transformers makes of its configuration of a shape."""
    has_score = model.score_outputs is not None
    return auto_class(config, has_score=has_score).from_config(
        config,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=model.trust_remote_code,
    )


def factory_model(
    model: ModelConfig, dtype: torch.dtype, *, on_meta: bool = False
) -> PreTrainedModel:
    """Return the model that `model.factory` makes, in the given type.

    The function gets the declared shape, and with `model=module` its own arguments.

    Args:
        on_meta: Whether the parameters of a module go to the meta device.
    """
    assert model.factory is not None
    if model.is_module:
        built: Any = adapt_module(model, on_meta=on_meta)
    else:
        built = load_user_function("model.factory", model.factory)(model)
    if not isinstance(built, PreTrainedModel):
        raise TrainctlError(
            f"model.factory={model.factory} gave a {type(built).__name__}",
            hint="return a transformers PreTrainedModel with a language-modelling head; "
            "model=module takes any torch.nn.Module",
        )
    for parameter in built.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return built


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to meta as it is registered, before its module initialises it."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    # `torch.device("meta")` would move the buffers too, which must be real.
    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def with_portable_attention(model: ModelConfig) -> ModelConfig:
    """Return the same model with attention that needs neither a GPU nor a package."""
    if model.attention is not AttentionKind.flash_attention_2:
        return model
    return replace(model, attention=AttentionKind.sdpa)


def blocks(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the decoder blocks, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def failures_in_words(model: ModelConfig, done: str) -> Iterator[None]:
    """Turn an exception of the model's code into one sentence without a traceback.

    Args:
        done: Participle for the message, "built" or "traced".

    Raises:
        TrainctlError: In place of any other exception.
    """
    # torch would log the error that is reported in a sentence below.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except TrainctlError:
        raise
    except Exception as error:
        where = f"{model.path}/config.json: " if model.is_directory else ""
        where = where if model.factory is None else f"model.factory={model.factory}: "
        what, hint = user_code.in_words(error), failure_hint(model)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            what = f"its code goes by values, and there are none ({_place_outside_torch(error)})"
            hint = "an architecture whose code goes by shapes" if model.is_directory else hint
        raise TrainctlError(f"{where}{model.name} cannot be {done}: {what}", hint=hint) from error
    finally:
        log.setLevel(level)


def _place_outside_torch(error: Exception) -> str:
    """Return file and line of the model's code that led to an error within torch."""
    torch_itself = str(Path(torch.__file__).parent)
    places = traceback.extract_tb(error.__traceback__)
    own = [place for place in places if not place.filename.startswith(torch_itself)]
    return f"{own[-1].filename}:{own[-1].lineno}"


def failure_hint(model: ModelConfig) -> str:
    """Return the hint for a model whose code fails."""
    if model.has_closed_form:
        return "leave --exact out: the budget then follows from the model's shape"
    if model.factory is not None:
        return "plan and budget count what this function makes, on tensors without values"
    if model.trust_remote_code or not has_own_code(model):
        return "transformers could not train from this directory either"
    return "config.json names code of its own (auto_map): model.trust_remote_code=true runs it"


def has_own_code(model: ModelConfig) -> bool:
    """Return True if the directory's config.json names code of its own for the model."""
    try:
        content = json.loads((Path(str(model.path)) / "config.json").read_text(encoding="utf-8"))
        named = set(content["auto_map"])
    except (OSError, ValueError, TypeError, LookupError):
        return False
    return not named.isdisjoint(("AutoConfig", "AutoModel", "AutoModelForCausalLM"))


def whole_pieces(model: PreTrainedModel) -> Pieces:
    """Return the pieces of a whole skeleton. A tied parameter goes by its first name."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(output_layer(model), "weight", None)
    inputs_first = {module.weight for module in model.modules() if isinstance(module, Conv1D)}
    return {
        parameter: ParameterPiece(
            name,
            parameter.shape,
            Shard.whole(parameter.shape),
            is_embedding=parameter in embeddings,
            is_head=parameter is head,
            inputs_first=parameter in inputs_first,
        )
        for name, parameter in model.named_parameters()
    }


def materialise(
    model: PreTrainedModel,
    source: WeightSource,
    device: torch.device,
    pieces: Pieces | None = None,
    make: MakeParameter | None = None,
    buffers: Sequence[Buffer] | None = None,
) -> Pieces:
    """Give this rank's part of the skeleton its values.

    Args:
        model: The skeleton, cut to this rank's stage and shards.
        pieces: Pieces of the skeleton's parameters; None for a whole model.
        make: Makes each parameter where ranks partition it (ZeRO-3); None gives this rank all of
            it.
        buffers: Persistent buffers of the skeleton; None for a whole model.

    Returns:
        The pieces of the real parameters.
    """
    pieces = whole_pieces(model) if pieces is None else pieces
    make = make or partial(_whole_shard, device)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module, attribute, meta in _parameter_places(model):
        if meta not in filled:
            piece = pieces[meta]
            read = partial(source.read, piece.name, piece.shape)
            filled[meta] = make(meta, piece, partial(read_shard, read, piece.shard))
        setattr(module, attribute, filled[meta])
    fill_buffers(persistent_buffers(model) if buffers is None else buffers, source)
    _move_buffers(model, device)
    return {filled[meta]: piece for meta, piece in pieces.items() if meta in filled}


def fill_buffers(buffers: Iterable[Buffer], source: WeightSource) -> None:
    """Copy a source's values into persistent buffers, where the source has them."""
    for buffer in buffers:
        values = source.buffer(buffer.name)
        if values is not None:
            buffer.tensor.copy_(values.view(buffer.tensor.shape))


def _whole_shard(
    device: torch.device, meta: nn.Parameter, piece: ParameterPiece, read: Read
) -> nn.Parameter:
    """Return this rank's shard of a parameter, unpartitioned."""
    data = read(0, meta.numel()).view(meta.shape).to(device=device, dtype=meta.dtype)
    return nn.Parameter(data, requires_grad=meta.requires_grad)


def _parameter_places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return every place of a parameter in the module tree; a tied parameter has several."""
    return [
        (module, attribute, parameter)
        for module in model.modules()
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def apply_multipliers(model: PreTrainedModel, config: ModelConfig) -> None:
    """Multiply the logits and the attention scores of a skeleton, wherever they are computed.

    The factor of the logits is applied to the head's input, which is equivalent and cheaper. Every
    loss, evaluation and sample goes through the head.
    """
    if not config.mup:
        return
    family, factors = family_of(model), multipliers(config)
    output_layer(model).register_forward_pre_hook(_multiplied_input(factors["output"]))
    for block in blocks_of(model):
        attention: Any = getattr(block, family.attention.module)
        # transformers' attention modules keep their factor here; no config option sets it.
        attention.scaling *= factors["attention"]


def _multiplied_input(factor: float) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * factor, *args[1:])

    return hook


def fold_multipliers(
    model: ModelConfig, name: str, shape: torch.Size, start: int, values: torch.Tensor
) -> torch.Tensor:
    """Return weights for the same model without multipliers, with these folded in.

    The factor of the logits goes into the norm before the head, so it does not matter whether
    the head is tied to the embedding. The factor of attention goes into the query projection
    (rotary embeddings keep the factor).

    Args:
        name: Canonical name of the parameter.
        shape: Shape of the whole parameter.
        start: Index of the first element of `values` in the flattened parameter.
        values: Some of its elements, flat.
    """
    if not model.mup:
        return values
    factors = multipliers(model)
    if name in {tensor.name for tensor in final_norm_tensors(model)}:
        return values * factors["output"]
    module = name.rpartition(".")[0]
    if factors["attention"] == 1:
        return values
    spec = spec_of(model)
    attention = spec.attention
    queries = (*attention.per_head, *attention.columns)[0]
    if not module.endswith(f".{attention.module}.{queries}"):
        return values
    if attention.fused == 1:
        return values * factors["attention"]
    # Queries, keys and values lie side by side: find the output that each element belongs to.
    element = torch.arange(start, start + values.numel(), device=values.device)
    is_by_row = len(shape) > 1 and not spec.inputs_first
    output = element // shape[-1] if is_by_row else element % shape[-1]
    is_query = output < model.num_attention_heads * head_dim(model)
    return torch.where(is_query, values * factors["attention"], values)


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model, looked up by its `model_type` in transformers.

    Raises:
        TrainctlError: trainctl has no family for this architecture.
    """
    family = family_of_type(model.config.model_type)
    if family is None:
        known = ", ".join(spec.name for spec in families())
        raise TrainctlError(
            f"muP and the loss's kernels do not know the {model.config.model_type} architecture; "
            f"they know {known}",
        )
    return family


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of the model's blocks."""
    family = family_of(model)
    found = getattr(getattr(model, family.decoder), family.blocks)
    assert isinstance(found, nn.ModuleList)
    return found
