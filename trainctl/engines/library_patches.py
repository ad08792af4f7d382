"""Tables of changes to torch, torchao and transformers, and of internals that trainctl uses."""

from __future__ import annotations

from trainctl.engines.patches import (
    ADAPTED,
    CHAT,
    EIGHT_BIT_MOMENTS,
    EXPERTS,
    FSDP2,
    LIGER_LOSS,
    MODULE,
    MUP,
    RECOMPUTED,
    SELECTIVE,
    SPARSE,
    TENSOR,
    ProcessKind,
    Table,
    Use,
    UseKind,
)

_DISPATCH = "torch.utils._python_dispatch:TorchDispatchMode"

_TORCH_USES = (
    Use(
        target="torch.nn.modules.module:Module.register_parameter",
        how=UseKind.replaced,
        why="while a model is built, so that no parameter ever takes memory or time to initialise",
        signature="(self, name, param)",
        at=ProcessKind.model,
    ),
    Use(
        target="torch.nn.modules.module:Module.register_forward_hook",
        how=UseKind.read,
        why="a proof does not compare outputs that a hook of tensor parallelism exchanges",
        contains="self._forward_hooks[handle.id] = hook",
        names=("_forward_hooks",),
        need=TENSOR,
    ),
    Use(
        target="torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule._apply",
        how=UseKind.called,
        why="shards that were put in the place of those on meta are padded and kept before the "
        "optimizer is told of them, not at the first forward pass",
        contains="fsdp_param.reset_sharded_param()",
        need=FSDP2,
    ),
    Use(
        target="torch.nn.modules.linear:Linear.forward",
        how=UseKind.extended,
        why="an adapter adds a product of two narrow matrices to what a linear layer gives",
        body="9b9e79ddd8dd",
        names=("__class__",),
        need=ADAPTED,
    ),
    Use(
        target="torch.nn.modules.linear:Linear.forward",
        how=UseKind.extended,
        why="a projection out of a tensor-parallel region adds its bias after the sum over ranks",
        body="9b9e79ddd8dd",
        names=("__class__",),
        need=TENSOR,
    ),
    Use(
        target="torch.nn.modules.sparse:Embedding.forward",
        how=UseKind.extended,
        why="a tensor-parallel rank looks up its own tokens",
        body="c06f22dedf9d",
        names=("__class__",),
        need=TENSOR,
    ),
    Use(
        target="torch.nn.modules.linear:Linear.__init__",
        how=UseKind.extended,
        why="the output projection computes the loss, by Liger's kernel",
        signature="(self, in_features, out_features, bias=True, device=None, dtype=None)",
        names=("__class__",),
        need=LIGER_LOSS,
    ),
    Use(
        target=f"{_DISPATCH}.__torch_dispatch__",
        how=UseKind.extended,
        why="what a block gives is kept or given back operation by operation: torch's own "
        "selective checkpointing keeps a product together with what is added to it in place",
        signature="(self, func, types, args=(), kwargs=None)",
        names=("_python_dispatch",),
        need=SELECTIVE,
    ),
    Use(
        target="torch._ops:OpOverload.__init__",
        how=UseKind.read,
        why="which tensors an operation writes to",
        contains="self._schema = schema",
        names=("_ops", "_schema"),
        need=SELECTIVE,
    ),
    Use(
        target="torch.utils._pytree:tree_leaves",
        how=UseKind.called,
        why="tensors among the arguments of an operation",
        signature="(tree, is_leaf=None)",
        names=("_pytree",),
        need=SELECTIVE,
    ),
    Use(
        target="torch.utils._pytree:tree_map_only",
        how=UseKind.called,
        why="tensors among the results of an operation",
        signature="(type_or_types_or_pred, /, func, tree, is_leaf=None)",
        names=("_pytree",),
        need=SELECTIVE,
    ),
    Use(
        target=f"{_DISPATCH}.__init__",
        how=UseKind.extended,
        why="what a model saves for its backward pass is recorded operation by operation",
        signature="(self, _dispatch_key=None)",
        names=("_python_dispatch",),
        at=ProcessKind.trace,
    ),
    Use(
        target="torch._subclasses.fake_tensor:FakeTensorMode.__init__",
        how=UseKind.called,
        why="a model of any size is traced on tensors without values",
        signature="(self, *, allow_fallback_kernels=True, allow_non_fake_inputs=False, "
        "shape_env=None, static_shapes=None, export=False)",
        names=("_subclasses",),
        at=ProcessKind.trace,
    ),
    Use(
        target="torch.storage:_StorageBase._cdata",
        how=UseKind.read,
        why="tensors without values have no address to tell their storages apart by",
        contains="_cdata",
        at=ProcessKind.trace,
    ),
    Use(
        target="torch.autograd.function:FunctionMeta.__init__",
        how=UseKind.read,
        why="the collectives of a module's tensor plan are found in its graph",
        contains="{'_forward_cls': cls}",
        names=("_forward_cls",),
        at=ProcessKind.trace,
        need=MODULE,
    ),
    Use(
        target="torch.testing._internal.distributed.fake_pg:FakeStore",
        how=UseKind.called,
        why="a module is cut for tensor ranks in one process, whose collectives do nothing",
        body="8b18fb25705f",
        names=("_internal",),
        at=ProcessKind.trace,
        need=MODULE,
    ),
)

TORCH = Table("torch", ("2.8.0", "2.13.0"), _TORCH_USES)

_QUANTISATION = "torchao.optim.quant_utils"
_WHY = "moments in 8 bits are torchao's, in blocks that are counted from a parameter's start"

TORCHAO = Table(
    "torchao",
    ("0.18.0",),
    (
        Use(
            target=f"{_QUANTISATION}:create_dynamic_map",
            how=UseKind.called,
            why=_WHY,
            body="d9b060fa8ae9",
            need=EIGHT_BIT_MOMENTS,
        ),
        Use(
            target=f"{_QUANTISATION}:quantize_8bit_with_qmap",
            how=UseKind.called,
            why=_WHY,
            signature="(input, qmap)",
            need=EIGHT_BIT_MOMENTS,
        ),
        Use(
            target=f"{_QUANTISATION}:dequant_with_qmap",
            how=UseKind.called,
            why=_WHY,
            signature="(codes, qmap, scale)",
            need=EIGHT_BIT_MOMENTS,
        ),
    ),
)

_MODELS = "transformers.models"
_ATTENTION = (
    f"{_MODELS}.gpt2.modeling_gpt2:GPT2Attention",
    f"{_MODELS}.llama.modeling_llama:LlamaAttention",
    f"{_MODELS}.mistral.modeling_mistral:MistralAttention",
    f"{_MODELS}.qwen3.modeling_qwen3:Qwen3Attention",
)

_TRANSFORMERS_USES = (
    Use(
        target="transformers.modeling_layers:GradientCheckpointingLayer",
        how=UseKind.replaced,
        why="a block is recomputed by trainctl's function, which decides what is kept meanwhile "
        "and where",
        contains="self._gradient_checkpointing_func(partial(",
        names=("_gradient_checkpointing_func", "gradient_checkpointing"),
        need=RECOMPUTED,
    ),
    Use(
        target="transformers.configuration_utils:PreTrainedConfig._attn_implementation",
        how=UseKind.read,
        why="which attention a model of the user's has chosen: a flash kernel gets no mask, and "
        "has to be told where documents begin",
        signature="(self, value)",
        at=ProcessKind.model,
    ),
    Use(
        target="transformers.pytorch_utils:Conv1D.forward",
        how=UseKind.extended,
        why="an adapter adds a product of two narrow matrices to what a linear layer gives",
        body="91d0f5dc9a87",
        names=("__class__",),
        need=ADAPTED,
    ),
    Use(
        target="transformers.pytorch_utils:Conv1D.forward",
        how=UseKind.extended,
        why="a projection out of a tensor-parallel region adds its bias after the sum over ranks",
        body="91d0f5dc9a87",
        names=("__class__",),
        need=TENSOR,
    ),
    Use(
        target="transformers.conversion_mapping:get_model_conversion_mapping",
        how=UseKind.called,
        why="published files have other names than a model in memory: transformers' own transforms",
        signature="(model, key_mapping=None, hf_quantizer=None, add_legacy=True)",
        at=ProcessKind.model,
    ),
    Use(
        target="transformers.core_model_loading:rename_source_key",
        how=UseKind.called,
        why="what a tensor of published files becomes",
        signature="(source_key, weight_renamings, weight_converters, base_model_prefix=None, "
        "meta_state_dict=None, reverse=False)",
        at=ProcessKind.model,
    ),
    Use(
        target="transformers.core_model_loading:WeightConverter.convert",
        how=UseKind.called,
        why="tensors of published files are joined by transformers' own operations",
        signature="(self, layer_name, model=None, config=None, hf_quantizer=None, "
        "loading_info=None)",
        at=ProcessKind.model,
    ),
    Use(
        target="transformers.core_model_loading:WeightTransform.add_tensor",
        how=UseKind.called,
        why="what a converter converts is given to it one by one",
        signature="(self, target_key, source_key, source_pattern, future)",
        at=ProcessKind.model,
    ),
    Use(
        target="transformers.core_model_loading:revert_weight_conversion",
        how=UseKind.read,
        why="an export is called as transformers calls what it saves: its order of transforms",
        body="1a1468de89e0",
        names=("apply_converters", "apply_renamings", "reverse_transform"),
        at=ProcessKind.model,
        fallback="exports may have other names than transformers gives its own",
    ),
    Use(
        target="transformers.utils.chat_template_utils:render_jinja_template",
        how=UseKind.called,
        why="a conversation becomes the text that it is in transformers, with the places of what "
        "the assistant says",
        signature="(conversations, tools=None, documents=None, chat_template=None, "
        "return_assistant_tokens_mask=False, continue_final_message=False, "
        "add_generation_prompt=False, **kwargs)",
        at=ProcessKind.model,
        need=CHAT,
    ),
    Use(
        target="transformers.modeling_utils:PreTrainedModel._init_weights",
        how=UseKind.called,
        why="a model's own code says how its parameters start; it is run on tensors without values",
        signature="(self, module)",
        at=ProcessKind.rank,
    ),
    Use(
        target="transformers.initialization:trunc_normal_",
        how=UseKind.replaced,
        why="torch's own draws until all values fit, which has no parts",
        contains="TORCH_INIT_FUNCTIONS['trunc_normal_'](tensor, mean=mean, std=std, a=a, b=b, "
        "generator=generator)",
        names=("TORCH_INIT_FUNCTIONS",),
        at=ProcessKind.model,
    ),
    Use(
        target="transformers.masking_utils:find_packed_sequence_indices",
        how=UseKind.replaced,
        why="a trace has no positions to find documents by",
        signature="(position_ids)",
        at=ProcessKind.trace,
    ),
    Use(
        target="transformers.integrations.moe:use_experts_implementation",
        how=UseKind.read,
        why="a model's experts are found, and computed by trainctl's function, whose rows come "
        "from all ranks of the expert axis",
        contains="experts_interface.get_interface(self.config._experts_implementation, "
        "original_forward)",
        names=("_experts_implementation", "_is_expert_parallel", "num_experts", "expert_axis"),
        at=ProcessKind.model,
        need=SPARSE,
    ),
    Use(
        target="transformers.integrations.moe:grouped_mm_experts_forward",
        how=UseKind.called,
        why="it multiplies the rows of a rank's own experts",
        signature="(self, hidden_states, top_k_index, top_k_weights)",
        need=EXPERTS,
    ),
    Use(
        target="transformers.integrations.moe:_can_use_grouped_mm",
        how=UseKind.replaced,
        why="torch's grouped product has shapes for tensors without values in bf16 only",
        signature="(input, weight, offs)",
        at=ProcessKind.trace,
    ),
    Use(
        target="transformers.modeling_utils:PreTrainedModel._is_stateful",
        how=UseKind.read,
        why="which architectures carry a state from token to token, that documents would share",
        contains="_is_stateful: bool = False",
        at=ProcessKind.trace,
    ),
    Use(
        target="transformers.modeling_utils:PreTrainedModel._supports_sdpa",
        how=UseKind.read,
        why="which attention an architecture can have, said before it is built",
        contains="_supports_sdpa: bool = False",
        at=ProcessKind.trace,
        fallback="the attention of a model is taken for one that it can have",
    ),
    Use(
        target="transformers.modeling_utils:PreTrainedModel._supports_flash_attn",
        how=UseKind.read,
        why="which attention an architecture can have, said before it is built",
        contains="_supports_flash_attn: bool = False",
        at=ProcessKind.trace,
        fallback="the attention of a model is taken for one that it can have",
    ),
)

SCALED = tuple(
    Use(
        target=f"{attention}.forward",
        how=UseKind.read,
        why="muP multiplies the scores of attention, by the factor that they have anyway",
        contains="scaling=self.scaling",
        names=("scaling",),
        at=ProcessKind.model,
        need=MUP,
    )
    for attention in _ATTENTION
)

TRANSFORMERS = Table("transformers", ("5.21.0", "5.23.0"), _TRANSFORMERS_USES + SCALED)
