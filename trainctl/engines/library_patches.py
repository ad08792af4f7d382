"""Tables of changes to torch, torchao and transformers, and of internals that trainctl uses."""

from __future__ import annotations

from trainctl.engines.patches import (
    ADAPTED,
    ALWAYS,
    CHAT,
    COMPILED,
    EIGHT_BIT_MOMENTS,
    EXPERTS,
    FSDP2,
    LIGER_LOSS,
    MODULE,
    MUP,
    RECOMPUTED,
    RING,
    SELECTIVE,
    SPARSE,
    TENSOR,
    ProcessKind,
    Table,
    called,
    extended,
    needed,
    read,
    replaced,
)

_DISPATCH = "torch.utils._python_dispatch:TorchDispatchMode"

_TORCH_USES = (
    replaced(
        "torch.nn.modules.module:Module.register_parameter(self, name, param)",
        "while a model is built, so that no parameter ever takes memory or time to initialise",
        at=ProcessKind.model,
    ),
    *needed(
        TENSOR,
        read(
            "torch.nn.modules.module:Module.register_forward_hook",
            "a proof does not compare outputs that a hook of tensor parallelism exchanges",
            contains="self._forward_hooks[handle.id] = hook",
            names=("_forward_hooks",),
        ),
        extended(
            "torch.nn.modules.linear:Linear.forward",
            "a projection out of a tensor-parallel region adds its bias after the sum over ranks",
            body="9b9e79ddd8dd",
            names=("__class__",),
        ),
        extended(
            "torch.nn.modules.sparse:Embedding.forward",
            "a tensor-parallel rank looks up its own tokens",
            body="c06f22dedf9d",
            names=("__class__",),
        ),
    ),
    read(
        "torch.distributed.distributed_c10d:get_process_group_ranks",
        "when collectives do not end, a rank tells which process groups it is in",
        contains="_world.pg_group_ranks",
        names=("_world",),
    ),
    *(
        called(
            f"torch.{user}",
            f"{what} all gradients of a step in one call: torch's own optimizers and clipping do",
            contains=f"torch.{call}",
            names=(call.partition("(")[0],),
        )
        for what, call, user in (
            (
                "it measures",
                "_foreach_norm(device_tensors, norm_type)",
                "nn.utils.clip_grad:_get_total_norm",
            ),
            (
                "it scales",
                "_foreach_mul_(device_grads, clip_coef_clamped.to(device))",
                "nn.utils.clip_grad:_clip_grads_with_norm_",
            ),
            (
                "it copies",
                "_foreach_copy_(grouped_mus, new_mus)",
                "optim.asgd:_multi_tensor_asgd",
            ),
        )
    ),
    called(
        "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule._apply",
        "shards that were put in the place of those on meta are padded and kept before the "
        "optimizer is told of them, not at the first forward pass",
        contains="fsdp_param.reset_sharded_param()",
        need=FSDP2,
    ),
    extended(
        "torch.nn.modules.linear:Linear.forward",
        "an adapter adds a product of two narrow matrices to what a linear layer gives",
        body="9b9e79ddd8dd",
        names=("__class__",),
        need=ADAPTED,
    ),
    extended(
        "torch.nn.modules.linear:Linear.__init__"
        "(self, in_features, out_features, bias=True, device=None, dtype=None)",
        "the output projection computes the loss, by Liger's kernel",
        names=("__class__",),
        need=LIGER_LOSS,
    ),
    *needed(
        SELECTIVE,
        extended(
            f"{_DISPATCH}.__torch_dispatch__(self, func, types, args=(), kwargs=None)",
            "what a block gives is kept or given back operation by operation: torch's own "
            "selective checkpointing keeps a product together with what is added to it in place",
            names=("_python_dispatch",),
        ),
        *(
            replaced(
                f"torch.nn.functional:{name}",
                "what it gives in a recomputed block is kept, or given back; nothing else is "
                "looked at",
                contains=f"torch._C._nn.{name}",
                names=("_nn",),
            )
            for name in ("linear", "scaled_dot_product_attention")
        ),
        extended(
            "torch.overrides:TorchFunctionMode.__torch_function__"
            "(self, func, types, args=(), kwargs=None)",
            "only calls that keep or change such a result are looked at operation by operation",
        ),
        read(
            "torch._ops:OpOverload.__init__",
            "which tensors an operation writes to",
            contains="self._schema = schema",
            names=("_ops", "_schema"),
        ),
        called(
            "torch.utils._pytree:tree_leaves(tree, is_leaf=None)",
            "tensors among the arguments of an operation",
            names=("_pytree",),
        ),
        called(
            "torch.utils._pytree:tree_map_only(type_or_types_or_pred, /, func, tree, is_leaf=None)",
            "tensors among the results of an operation",
            names=("_pytree",),
        ),
    ),
    called(
        "torch._dynamo.utils:get_compilation_metrics()",
        "what is compiled anew after the first steps is told, with torch's reason",
        names=("_dynamo",),
        need=COMPILED,
    ),
    *needed(
        ALWAYS,
        extended(
            f"{_DISPATCH}.__init__(self, _dispatch_key=None)",
            "what a model saves for its backward pass is recorded operation by operation",
            names=("_python_dispatch",),
        ),
        called(
            "torch._subclasses.fake_tensor:FakeTensorMode.__init__"
            "(self, *, allow_fallback_kernels=True, allow_non_fake_inputs=False, "
            "shape_env=None, static_shapes=None, export=False)",
            "a model of any size is traced on tensors without values",
            names=("_subclasses",),
        ),
        read(
            "torch.storage:_StorageBase._cdata",
            "tensors without values have no address to tell their storages apart by",
            contains="_cdata",
        ),
        at=ProcessKind.trace,
    ),
    *needed(
        MODULE,
        read(
            "torch.autograd.function:FunctionMeta.__init__",
            "the collectives of a module's tensor plan are found in its graph",
            contains="{'_forward_cls': cls}",
            names=("_forward_cls",),
        ),
        called(
            "torch.testing._internal.distributed.fake_pg:FakeStore",
            "a module is cut for tensor ranks in one process, whose collectives do nothing",
            body="8b18fb25705f",
            names=("_internal",),
        ),
        at=ProcessKind.trace,
    ),
    *needed(
        RING,
        *(
            called(
                f"torch._meta_registrations:meta__scaled_dot_product_{kernel}, scale=None)",
                "ring attention merges blocks by the log-sum-exp that fused kernels return",
                names=(f"_scaled_dot_product_{name}",),
            )
            for name, kernel in {
                "flash_attention_for_cpu": "flash_attention_for_cpu(query, key, value, "
                "dropout_p=0.0, is_causal=False, attn_mask=None",
                "flash_attention_for_cpu_backward": "flash_attention_for_cpu_backward(grad_out, "
                "query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=None",
                "flash_attention": "flash_attention(query, key, value, dropout_p=0.0, "
                "is_causal=False, return_debug_mask=False",
                "flash_attention_backward": "flash_backward(grad_out, query, key, value, out, "
                "logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, "
                "philox_offset",
                "cudnn_attention": "cudnn_attention(query, key, value, attn_bias, "
                "compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False",
                "cudnn_attention_backward": "cudnn_backward(grad_out, query, key, value, out, "
                "logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, "
                "max_k, dropout_p, is_causal",
            }.items()
        ),
    ),
)

TORCH = Table("torch", ("2.8.0", "2.13.0"), _TORCH_USES)

_QUANTISATION = "torchao.optim.quant_utils"
_WHY = "moments in 8 bits are torchao's, in blocks that are counted from a parameter's start"

TORCHAO = Table(
    "torchao",
    ("0.18.0",),
    needed(
        EIGHT_BIT_MOMENTS,
        called(f"{_QUANTISATION}:create_dynamic_map", _WHY, body="d9b060fa8ae9"),
        called(f"{_QUANTISATION}:quantize_8bit_with_qmap(input, qmap)", _WHY),
        called(f"{_QUANTISATION}:dequant_with_qmap(codes, qmap, scale)", _WHY),
    ),
)

_TRANSFORMERS_USES = (
    replaced(
        "transformers.modeling_layers:GradientCheckpointingLayer",
        "a block is recomputed by trainctl's function, which decides what is kept meanwhile "
        "and where",
        contains="self._gradient_checkpointing_func(partial(",
        names=("_gradient_checkpointing_func", "gradient_checkpointing"),
        need=RECOMPUTED,
    ),
    *needed(
        ALWAYS,
        read(
            "transformers.configuration_utils:PreTrainedConfig._attn_implementation(self, value)",
            "which attention a model of the user's has chosen: a flash kernel gets no mask, and "
            "has to be told where documents begin",
        ),
        called(
            "transformers.conversion_mapping:get_model_conversion_mapping"
            "(model, key_mapping=None, hf_quantizer=None, add_legacy=True)",
            "published files have other names than a model in memory: transformers' own transforms",
        ),
        called(
            "transformers.core_model_loading:rename_source_key(source_key, weight_renamings, "
            "weight_converters, base_model_prefix=None, meta_state_dict=None, reverse=False)",
            "what a tensor of published files becomes",
        ),
        called(
            "transformers.core_model_loading:WeightConverter.convert(self, layer_name, model=None,"
            " config=None, hf_quantizer=None, loading_info=None)",
            "tensors of published files are joined by transformers' own operations",
        ),
        called(
            "transformers.core_model_loading:WeightTransform.add_tensor"
            "(self, target_key, source_key, source_pattern, future)",
            "what a converter converts is given to it one by one",
        ),
        read(
            "transformers.core_model_loading:revert_weight_conversion",
            "an export is called as transformers calls what it saves: its order of transforms",
            body="1a1468de89e0",
            names=("apply_converters", "apply_renamings", "reverse_transform"),
            fallback="exports may have other names than transformers gives its own",
        ),
        replaced(
            "transformers.initialization:trunc_normal_",
            "torch's own draws until all values fit, which has no parts",
            contains="TORCH_INIT_FUNCTIONS['trunc_normal_'](tensor, mean=mean, std=std, a=a, b=b, "
            "generator=generator)",
            names=("TORCH_INIT_FUNCTIONS",),
        ),
        at=ProcessKind.model,
    ),
    *needed(
        ADAPTED,
        extended(
            "transformers.pytorch_utils:Conv1D.forward",
            "an adapter adds a product of two narrow matrices to what a linear layer gives",
            body="91d0f5dc9a87",
            names=("__class__",),
        ),
        read(
            "transformers.integrations.moe:_grouped_mm",
            "experts with an adapter are multiplied by a sum of products, which stands in for the "
            "tensor of their weights",
            contains="torch.nn.functional.grouped_mm(input.to(weight.dtype), weight, offs=offs)",
        ),
    ),
    extended(
        "transformers.pytorch_utils:Conv1D.forward",
        "a projection out of a tensor-parallel region adds its bias after the sum over ranks",
        body="91d0f5dc9a87",
        names=("__class__",),
        need=TENSOR,
    ),
    *(
        replaced(
            f"transformers.masking_utils:create_{kind}_mask",
            "it keeps documents apart by position_ids, which some models (gpt-oss, AFMoE, Falcon) "
            "leave out, and others make where there are no documents: it takes those that the "
            "running forward pass was given",
            contains="_preprocess_mask_arguments(config, inputs_embeds, attention_mask, "
            "past_key_values, position_ids, layer_idx)",
            names=("CAUSAL_MASKS",),
            at=ProcessKind.model,
        )
        for kind in ("causal", "sliding_window_causal", "chunked_causal")
    ),
    called(
        "transformers.utils.chat_template_utils:render_jinja_template(conversations, tools=None, "
        "documents=None, chat_template=None, return_assistant_tokens_mask=False, "
        "continue_final_message=False, add_generation_prompt=False, **kwargs)",
        "a conversation becomes the text that it is in transformers, with the places of what "
        "the assistant says",
        need=CHAT,
        at=ProcessKind.model,
    ),
    called(
        "transformers.modeling_utils:PreTrainedModel._init_weights(self, module)",
        "a model's own code says how its parameters start; it is run on tensors without values",
    ),
    *needed(
        ALWAYS,
        replaced(
            "transformers.masking_utils:find_packed_sequence_indices(position_ids)",
            "a trace has no positions to find documents by",
        ),
        replaced(
            "transformers.integrations.moe:_can_use_grouped_mm(input, weight, offs)",
            "torch's grouped product has shapes for tensors without values in bf16 only",
        ),
        read(
            "transformers.modeling_utils:PreTrainedModel._is_stateful",
            "which architectures carry a state from token to token, that documents would share",
            contains="_is_stateful: bool = False",
        ),
        read(
            "transformers.modeling_utils:PreTrainedModel._supports_sdpa",
            "which attention an architecture can have, said before it is built",
            contains="_supports_sdpa: bool = False",
            fallback="the attention of a model is taken for one that it can have",
        ),
        read(
            "transformers.modeling_utils:PreTrainedModel._supports_flash_attn",
            "which attention an architecture can have, said before it is built",
            contains="_supports_flash_attn: bool = False",
            fallback="the attention of a model is taken for one that it can have",
        ),
        at=ProcessKind.trace,
    ),
    *needed(
        SPARSE,
        read(
            "transformers.integrations.moe:use_experts_implementation",
            "a model's experts are found, and computed by trainctl's function, whose rows come "
            "from all ranks of the expert axis",
            contains="experts_interface.get_interface(self.config._experts_implementation, "
            "original_forward)",
            names=(
                "_experts_implementation",
                "_is_expert_parallel",
                "num_experts",
                "expert_axis",
                "tensor_axis",
            ),
        ),
        called(
            "transformers.integrations.moe:_can_use_grouped_mm(input, weight, offs)",
            "the record of a start says what multiplies the experts",
        ),
        at=ProcessKind.model,
    ),
    called(
        "transformers.integrations.moe:grouped_mm_experts_forward"
        "(self, hidden_states, top_k_index, top_k_weights)",
        "it multiplies the rows of a rank's own experts",
        need=EXPERTS,
    ),
    *needed(
        MUP,
        *(
            read(
                f"transformers.models.{attention}.forward",
                "muP multiplies the scores of attention, by the factor that they have anyway",
                contains="scaling=self.scaling",
                names=("scaling",),
            )
            for attention in (
                "gpt2.modeling_gpt2:GPT2Attention",
                "llama.modeling_llama:LlamaAttention",
                "mistral.modeling_mistral:MistralAttention",
                "qwen3.modeling_qwen3:Qwen3Attention",
            )
        ),
        at=ProcessKind.model,
    ),
)

TRANSFORMERS = Table("transformers", ("5.21.0", "5.23.0"), _TRANSFORMERS_USES)
