"""Trace of a model without memory: its exact tensors, and what autograd saves in each block.

The model runs once on fake tensors, which have shapes, types and storages but no values
(`torch._subclasses.FakeTensorMode`). So a model of any size is traced on any machine, in the time
that Python takes to run its code. A storage counts once, however many operations save a view of
it; weights and buffers do not count.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    masking_utils,
)
from transformers.integrations import moe
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import AttentionKind, ModelConfig, RunConfig
from trainctl.engines import patch_checks as declared
from trainctl.engines.patches import ProcessKind
from trainctl.errors import TrainctlError
from trainctl.memory.activations import BlockActivations, block_activations
from trainctl.memory.constants import BYTES
from trainctl.memory.traced import TracedModel, block_part
from trainctl.options.engine import engine_of
from trainctl.options.precision import precision_of
from trainctl.plans.settings import number_formats
from trainctl.train.models.anatomy import (
    anatomy_of_built,
    require_blocks,
    skip_duplicate_blocks,
    supported_attentions,
)
from trainctl.train.models.model import (
    TORCH_TYPES,
    factory_model,
    failures_in_words,
    transformers_config,
    transformers_model,
    whole_pieces,
)
from trainctl.train.models.module_layouts import other_ranks
from trainctl.train.models.selective import SAVED_OPERATIONS
from trainctl.train.models.weights import storage_id
from trainctl.train.parallel.tensor import shard_model


def trace(config: RunConfig) -> TracedModel:
    """Trace the model of a configuration, in its precision and sequence length.

    Flash attention is traced as sdpa, since both save the same tensors. Kernels that replace
    transformers' own (`config.kernels`) are not traced.

    Raises:
        TrainctlError: The model's decoder blocks cannot be found, or its code depends on tensor
            values, which fake tensors lack.
    """
    declared.require_definitions(config, {ProcessKind.trace})
    dtype = TORCH_TYPES[number_formats(config.precision).weights]
    with FakeTensorMode(allow_non_fake_inputs=True):
        with failures_in_words(config.model, "traced"):
            model = _fake_model(config.model, dtype)
            anatomy = anatomy_of_built(model, config.model)
            with _cut_module(model, config):
                recorder = Recorder(model, skip_duplicate_blocks(model))
                # FSDP2 casts the inputs of blocks.
                keeps_types = config.model.is_module and engine_of(config).takes_json
                with _OneTypeProducts(config) if keeps_types else nullcontext():
                    _forward(model, config, recorder)
            return TracedModel(anatomy=anatomy, block=_mean_of_blocks(recorder, config))


@contextmanager
def _cut_module(model: PreTrainedModel, config: RunConfig) -> Iterator[None]:
    """Let a module of the user's run as on a tensor rank; do nothing to any other model."""
    count = config.parallelism.tensor
    if not config.model.is_module or count == 1:
        yield
        return
    with other_ranks(count) as axis:
        shard_model(model, whole_pieces(model), axis, sequence_sharded_norms=False)
        yield


PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}
"""Operations whose tensors must be of one type on a device. Fake tensors may be of several."""


class _OneTypeProducts(TorchDispatchMode):
    """Dispatch mode that refuses products of tensors of several types."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._config = config

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {str(each.dtype)[6:] for each in args if isinstance(each, torch.Tensor)}
        if func.name() in PRODUCTS and len(kinds) > 1:
            files = (torch.__file__, masking_utils.__file__)
            between = (*(str(Path(each).parent) for each in files), __file__)
            own = [f for f in traceback.extract_stack() if not f.filename.startswith(between)]
            words, factory = " by ".join(sorted(kinds)), self._config.model.factory
            raise TrainctlError(
                f"model.factory={factory} multiplies {words} ({own[-1].filename}:{own[-1].lineno})",
                hint="weights have the type of precision.compute, and buffers the one that the "
                "module gives them: table.to(hidden.dtype); or precision.autocast=true",
            )
        return func(*args, **(kwargs or {}))


def _forward(model: PreTrainedModel, config: RunConfig, recorder: Recorder) -> None:
    """Run one sample forward, from the tokens to the logits, under the recorder."""
    precision = config.precision
    autocast = TORCH_TYPES[precision_of(precision).format]
    tokens = torch.zeros(1, config.training.sequence_length, dtype=torch.long)
    with (
        recorder,
        _skip_document_search(config),
        _allow_any_expert_format(),
        torch.autocast("cpu", autocast, enabled=precision.autocast),
    ):
        model(input_ids=tokens, use_cache=False)


@dataclass(slots=True)
class TracedBytes:
    """Bytes that autograd saves in one block, by part, and the number of blocks of its kind."""

    boundary: int
    blocks: int
    parts: Counter[str] = field(default_factory=Counter)
    products: int = 0


class Recorder(TorchDispatchMode):
    """Dispatch mode that records what autograd saves in the forward pass of each decoder block.

    Args:
        counts: The blocks that compute, each with the number of blocks of its kind.

    Attributes:
        blocks: Record of each block that has run, in order.
    """

    def __init__(self, model: nn.Module, counts: Mapping[nn.Module, int]) -> None:
        super().__init__()
        self._counts = counts
        self.blocks: list[TracedBytes] = []
        self._part: str | None = None
        self._weights = {storage_id(tensor) for tensor in model.parameters()}
        # Tensors by storage key; holding the tensor keeps its key from being reused.
        self._ignored: dict[int, torch.Tensor] = {}
        self._seen: dict[int, torch.Tensor] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._ignore(tensor)
        self._owners: dict[int, str] = {}
        self._handles = list(self._watch())
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._hooks.__exit__(*reason)
        super().__exit__(*reason)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name() == "aten::_to_copy" and storage_id(args[0]) in self._weights:
            self._ignore(output)  # autocast's copy of a weight: counted with the weights
        if self._part is not None and func.name() in SAVED_OPERATIONS:
            results = output if isinstance(output, tuple) else (output,)
            self.blocks[-1].products += sum(
                result.untyped_storage().nbytes()
                for result in results
                if isinstance(result, torch.Tensor)
            )
        return output

    def _watch(self) -> Iterator[RemovableHandle]:
        for block in self._counts:
            yield block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
            yield block.register_forward_hook(self._leave_block)
            for name, child in block.named_children():
                part = block_part(name)
                if part != "norms":
                    yield child.register_forward_pre_hook(self._entering(part), with_kwargs=True)
                    yield child.register_forward_hook(self._leave_child)

    def _enter_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        # What all blocks share (positions, a mask) is kept once, whatever their number.
        hidden, *shared = _tensors_in((args, kwargs))
        for tensor in shared:
            self._ignore(tensor)
        size = hidden.numel() * hidden.element_size()
        self.blocks.append(TracedBytes(boundary=size, blocks=self._counts[block]))
        self._part = "norms"

    def _leave_block(self, *_: Any) -> None:
        self._part = None

    def _entering(self, part: str) -> Any:
        def enter(child: nn.Module, args: Any, kwargs: Any) -> None:
            # The input is a norm's output, and the closed form counts it with the norms.
            self._owners |= {storage_id(tensor): "norms" for tensor in _tensors_in((args, kwargs))}
            self._part = part

        return enter

    def _leave_child(self, *_: Any) -> None:
        self._part = "norms"

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_id(tensor)
        if self._part is not None and key not in self._ignored and key not in self._seen:
            self._seen[key] = tensor.detach()
            size = tensor.untyped_storage().nbytes()
            self.blocks[-1].parts[self._owners.get(key, self._part)] += size
        return tensor

    def _ignore(self, tensor: torch.Tensor) -> None:
        self._ignored[storage_id(tensor)] = tensor


@contextmanager
def _skip_document_search(config: RunConfig) -> Iterator[None]:
    """Keep transformers from looking for packed documents, unless documents are masked.

    The search looks at the positions, which have no values here. In training, transformers
    finds one document without masking; with masking it builds the mask in any case.
    """
    original = masking_utils.find_packed_sequence_indices
    if not config.data.mask_documents:
        masking_utils.find_packed_sequence_indices = lambda positions: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def _allow_any_expert_format() -> Iterator[None]:
    """Let transformers multiply experts that are not in bf16 one after the other.

    torch's grouped product accepts other formats on devices, but computes the shapes of fake
    tensors for bf16 only. Both ways save the same tensors.
    """
    original = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda input, weight, offs: (
        weight.dtype is torch.bfloat16 and original(input, weight, offs)
    )
    try:
        yield
    finally:
        moe._can_use_grouped_mm = original


def _fake_model(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with fake weights, in training mode."""
    if model.factory is not None:
        built = factory_model(model, dtype)
    else:
        config = transformers_config(model)
        attention = _traceable_attention(model, config).value
        built = transformers_model(model, config, dtype, attention)
    built.train()
    require_blocks(built, model)
    return built


def _traceable_attention(model: ModelConfig, config: PretrainedConfig) -> AttentionKind:
    """Return the attention to trace; flash attention saves the same tensors as sdpa."""
    if model.attention is not AttentionKind.flash_attention_2:
        return model.attention
    code = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    has_sdpa = code is None or AttentionKind.sdpa.value in supported_attentions(code)
    return AttentionKind.sdpa if has_sdpa else AttentionKind.eager


def _mean_of_blocks(recorder: Recorder, config: RunConfig) -> BlockActivations:
    """Return the mean of all blocks, in bytes per token.

    The gradients that live within a block are taken from the closed form. Without one, the
    gradient of attention is as large as its saved tensors. The gradient of the feed-forward
    layer is half as large as its saved tensors: gate and up, out of gate, up, silu and product.
    Both also include the gradients of the block's input and output.
    """
    places = sum(block.blocks for block in recorder.blocks) * config.training.sequence_length
    element = BYTES[precision_of(config.precision).format]

    def mean(size: Callable[[TracedBytes], int]) -> int:
        return round(sum(block.blocks * size(block) for block in recorder.blocks) / places)

    attention = mean(lambda block: block.parts["attention"])
    feed_forward = mean(lambda block: block.parts["feed_forward"])
    boundary = mean(lambda block: block.boundary)
    ends = config.model.hidden_size * element + boundary
    found = BlockActivations(
        norms=mean(lambda block: block.parts["norms"]),
        attention=attention,
        scores=0,
        feed_forward=feed_forward,
        boundary=boundary,
        products=mean(lambda block: block.products),
        feed_forward_gradient=feed_forward // 2 + ends,
        attention_gradient=attention + ends,
    )
    if not config.model.has_closed_form:
        return found
    closed = block_activations(
        config.model,
        sequence_length=config.training.sequence_length,
        element=element,
        autocast=config.precision.autocast,
    )
    return replace(
        found,
        feed_forward_gradient=closed.feed_forward_gradient,
        attention_gradient=closed.attention_gradient,
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
