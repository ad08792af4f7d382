"""Table of trainctl's changes to DeepSpeed, and of undocumented parts that it uses."""

from __future__ import annotations

from trainctl.engines.patches import (
    DEEPSPEED_JSON,
    EXPERTS,
    FP16,
    GATHERED_BLOCKS,
    OPTIMIZER_ON_HOST,
    OPTIMIZER_ON_NVME,
    PARAMETERS_ON_NVME,
    PART_OFFLOADED,
    PARTITIONED,
    PIPELINE,
    SEQUENCE,
    STAGE_0,
    STAGE_3,
    STAGES_1_2,
    TENSOR,
    ZENFLOW,
    Table,
    called,
    needed,
    read,
    replaced,
)

_CHANGES = "trainctl.engines.deepspeed.changes"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_COORDINATOR = (
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
)
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_ZENFLOW = "deepspeed.runtime.zenflow.zenflow_stage_1_and_2:ZenFlowZeroOptimizer"
_PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_DUALPIPEV = "deepspeed.runtime.pipe.dualpipev:DualPipeV"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"

USES = (
    replaced(
        "deepspeed.comm.torch:build_shm_op",
        "it compiles an all-reduce for the CPU at the start of each process that has none; "
        "trainctl takes gloo's, which knows groups",
        contains="deepspeed.ops.__compatible_ops__.get(builder.NAME, False)",
        names=("__compatible_ops__",),
        apply=f"{_CHANGES}:disable_shm_allreduce",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/7625",
    ),
    replaced(
        "deepspeed.runtime.compiler:compile()",
        "each optimizer imports DeepSpeed's Muon, which has torch's compiler imported by it: a "
        "second of a rank's start, for two functions that trainctl never calls",
        apply=f"{_CHANGES}:leave_muon_uncompiled",
        fallback="ranks may start a second later",
    ),
    read(
        f"{_ENGINE}.is_gradient_accumulation_boundary",
        "it takes a step's end for a multiple of the accumulation steps, which a ramp of the "
        "batch changes",
        contains="(self.micro_steps + 1) % self.gradient_accumulation_steps() == 0",
        names=("micro_steps",),
    ),
    replaced(
        "deepspeed.runtime.zero.partition_parameters:_no_gather_coalesced",
        "a parameter read from NVMe lies in a buffer that the next one is read into, and a "
        "recomputed block still holds it: its gradient was off by some percent",
        body="68ab770ab3b7",
        apply=f"{_CHANGES}:copy_from_swap_buffers",
        need=PARAMETERS_ON_NVME,
    ),
    *needed(
        GATHERED_BLOCKS,
        replaced(
            f"{_COORDINATOR}.__params_to_release",
            "blocks of the end of the forward pass and embeddings stay gathered where blocks are "
            "gathered as a whole: other units are read as the released one is",
            contains="iter_params(module, recurse=z3_leaf_module(submodule_to_release))",
            names=("_PartitionedParameterCoordinator__params_to_release",),
            apply=f"{_CHANGES}:count_blocks_by_their_parameters",
        ),
    ),
    replaced(
        f"{_STAGE_3}.create_reduce_and_remove_grad_hooks",
        "gradients of a block that is gathered as a whole are reduced in a hook of its inputs: "
        "before they are there if the inputs have no gradient, or if the block runs twice",
        contains="if not z3_leaf_parameter(param):",
        names=("z3_leaf_parameter",),
        apply=f"{_CHANGES}:reduce_gradients_one_by_one",
        need=GATHERED_BLOCKS,
    ),
    *needed(
        STAGE_3,
        replaced(
            "deepspeed.utils.nvtx:instrument_w_nvtx(func)",
            "each of thousands of calls in a step begins and ends a range for a profiler: 7 % of "
            "the host's time",
            names=("enable_nvtx",),
            apply=f"{_CHANGES}:leave_out_profiler_ranges",
            fallback="the host may need 7 % more time for a step",
        ),
        replaced(
            "deepspeed.runtime.zero.partitioned_param_coordinator:iter_params"
            "(module, recurse=False)",
            "the modules of a block are walked through at each gathering and release: 7 % of the "
            "host's time",
            apply=f"{_CHANGES}:list_parameters_once",
            fallback="the host may need 7 % more time for a step",
        ),
        replaced(
            "deepspeed.runtime.zero.partition_parameters:print_rank_0"
            "(message, debug=False, force=False)",
            "the rank is looked up for thousands of messages in a step, none of which is printed: "
            "4 % of the host's time",
            apply=f"{_CHANGES}:leave_out_debug_messages",
            fallback="the host may need 4 % more time for a step",
        ),
        replaced(
            "deepspeed.runtime.zero.linear:LinearFunctionForZeroStage3.forward"
            "(input, weight, bias=None)",
            "torch reads the signature of this function anew at each product: 8 % of the host's "
            "time",
            names=("__signature__",),
            apply=f"{_CHANGES}:keep_signature_of_products",
            fallback="the host may need 8 % more time for a step",
        ),
    ),
    *needed(
        ZENFLOW,
        replaced(
            f"{_STAGE_1_2}._update_model_bit16_weights",
            "ZenFlow's flat buffers hold matrices transposed, and the model's weights are cut out "
            "of them as if they did not: every matrix is scrambled",
            body="709523950358",
            apply=f"{_CHANGES}:cut_out_transposed_weights",
        ),
        replaced(
            f"{_ZENFLOW}.sync_fp32_param_from_gpu",
            "each choice of columns rounds all master weights to the weights' format, where only "
            "those of the updated columns are out of date",
            body="05903b4e0c77",
            apply=f"{_CHANGES}:settle_updated_masters_only",
        ),
        called(
            f"{_ZENFLOW}._sync_selective_optimizer_lr(self)",
            "the device's part makes its update in the backward pass, with the rate of the step "
            "before unless it is told earlier",
        ),
        read(
            f"{_ZENFLOW}.is_zenflow_select_boundary",
            "a resumed run has no moments of the columns on the device: they are chosen anew",
            contains="self.micro_step - self.full_warm_up_rounds == 0",
            names=("micro_step", "full_warm_up_rounds"),
        ),
    ),
    *needed(
        PIPELINE,
        read(
            f"{_PIPELINE}._exec_schedule",
            "the update waits until all ranks have seen that the loss is finite, and the parts of "
            "a step are timed",
            contains="MethodType(self._INSTRUCTION_MAP[type(cmd)], self)",
            names=("_INSTRUCTION_MAP",),
        ),
        called(
            f"{_PIPELINE}._exec_optimizer_step(self, lr_kwargs=None)",
            "the update, when all ranks have seen that the loss is finite",
        ),
        read(
            f"{_PIPELINE}._exec_forward_pass",
            "an evaluation adds its loss to whatever the last one left there",
            contains="self.total_loss = add_to_total_loss(self.total_loss, self.loss)",
            names=("total_loss",),
        ),
        replaced(
            f"{_DUALPIPEV}Engine._inference_schedule(self, micro_batches)",
            "an evaluation sends one micro-batch at a time, and the schedule takes two for each "
            "rank or more",
        ),
        read(
            f"{_DUALPIPEV}Engine._phase1_buffer",
            "the labels of an evaluation are where a step of all micro-batches would have them",
            contains="return buffer_id + self.micro_batches",
            names=("micro_batches",),
        ),
        read(
            f"{_DUALPIPEV}Module.activate_phase",
            "which of a rank's two stages runs",
            contains="self.active_phase = phase",
            names=("active_phase",),
        ),
        read(
            "deepspeed.runtime.constants:PIPE_REPLICATED",
            "it marks a tied weight on the last stage: the first one counts it in the gradient's "
            "norm",
            contains="PIPE_REPLICATED = 'ds_pipe_replicated'",
            names=("ds_pipe_replicated",),
        ),
    ),
    replaced(
        f"{_UNFUSED}.step(self, closure=None)",
        "it reads a flag of every gradient and two numbers of every parameter group from the "
        "device, for what the trainer has judged and measured",
        names=("overflow", "low_precision_dtype"),
        need=STAGE_0,
    ),
    *needed(
        STAGES_1_2,
        replaced(
            f"{_STAGE_1_2}.scaled_global_norm(self, norm_type=2)",
            "the trainer has measured the norm; this one waits for ever where one pipeline stage "
            "has more parameter groups than another",
            upstream="https://github.com/deepspeedai/DeepSpeed/issues/1522",
        ),
        replaced(
            f"{_STAGE_1_2}.unscale_and_clip_grads(self, grad_groups_flat, total_norm)",
            "gradients below the limit are not multiplied by 1, and no number is read from the "
            "device",
        ),
        replaced(
            f"{_STAGE_1_2}.step(self, closure=None)",
            "for a step whose gradients are discarded: DeepSpeed counts it and makes no update",
            names=("overflow", "micro_step_id", "_offload_accumulated_param_ids"),
        ),
        called(
            f"{_STAGE_1_2}._wait_for_offload_copies(self)",
            "gradients are looked at when they have arrived in host memory",
        ),
        called(
            f"{_STAGE_1_2}._release_preflattened_grad_buffers(self, group_idx=None)",
            "discarding gradients frees their buffers as an update does",
        ),
        read(
            f"{_STAGE_1_2}.unscale_and_clip_grads",
            "what gradients are clipped at is set before each update",
            contains="self.clip_grad > 0.0",
            names=("clip_grad",),
        ),
    ),
    *needed(
        STAGE_3,
        replaced(f"{_STAGE_3}._get_norm_groups(self)", "the trainer has measured the norm"),
        replaced(
            f"{_STAGE_3}.unscale_and_clip_grads(self, sub_group_id, total_norm)",
            "gradients below the limit are not multiplied by 1, and no number is read from the "
            "device",
        ),
        replaced(
            f"{_STAGE_3}.step(self, closure=None)",
            "for a step whose gradients are discarded: DeepSpeed counts it and makes no update",
            names=("overflow",),
        ),
        called(f"{_STAGE_3}._pre_step(self)", "discarding gradients begins as an update does"),
        called(
            f"{_STAGE_3}._overflow_clean_up(self, prev_scale)",
            "it drops the gradients of a step, wherever they are",
        ),
        called(
            f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters(self, sub_group_id)",
            "parameters follow the master weights of a checkpoint that is loaded into a running "
            "engine",
        ),
        called(
            f"{_STAGE_3}._swappable_optimizer_subgroup(self, sub_group_id)",
            "which of the optimizer's tensors are on NVMe",
        ),
        called(
            "deepspeed.utils.groups:_get_zero_param_intra_parallel_group()",
            "`zero.Init` without it keeps no copy of the parameters within a node (ZeRO++)",
        ),
        read(
            "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
            "the copy within a node of weights that are not set yet is dropped (ZeRO++); the next "
            "gathering makes it anew",
            contains="param.ds_secondary_tensor = None",
            names=("ds_secondary_tensor",),
        ),
        read(
            f"{_STAGE_3}.unscale_and_clip_grads",
            "what gradients are clipped at is set before each update",
            contains="self.clip_grad > 0.0",
            names=("clip_grad",),
        ),
    ),
    *needed(
        PARTITIONED,
        replaced(
            f"{_BF16}.step(self, closure=None)",
            "for a step whose gradients are discarded: DeepSpeed counts it and makes no update",
            names=("overflow",),
        ),
        read(
            "deepspeed.utils.mixed_precision_linkage:link_hp_params",
            "which part of a parameter lies where in this rank's master weights",
            contains="lp_param._hp_mapping = get_hp_fragment_mapping(",
            names=("_hp_mapping",),
        ),
    ),
    *needed(
        OPTIMIZER_ON_NVME,
        called(
            f"{_STAGE_3}._optimizer_states_and_gradient_swap_in"
            "(self, sub_group_id, timer_names=None)",
            "states on NVMe are read to be saved, loaded, or to change a gradient",
        ),
        called(
            f"{_STAGE_3}._optimizer_states_and_gradient_swap_out"
            "(self, sub_group_id, timer_names=None)",
            "states on NVMe are written that a checkpoint brought",
        ),
        called(
            f"{_STAGE_3}._release_swap_buffers(self, sub_group_id)",
            "states on NVMe that were only read are not written again",
        ),
        called(
            f"{_STAGE_3}._writeback_swap_state"
            "(self, sub_group_id, write_opt_state, write_gradients)",
            "a changed gradient is written back without the states",
        ),
    ),
    read(
        f"{_STAGE_3}.__init__",
        "the first group of the device's part keeps its first learning rate, unlike the "
        "others: it is made to share the host's groups",
        contains="self.backup_optimizer.add_param_group(self.optimizer.param_groups[i])",
        names=("backup_optimizer",),
        need=PART_OFFLOADED,
    ),
    replaced(
        f"{_STAGE_1_2}.update_offload_overflow_tracker(self, grad)",
        "where DeepSpeed is not to look for overflows, it still reads a flag of every gradient",
        names=("check_grad_overflow",),
        need=OPTIMIZER_ON_HOST,
    ),
    called(
        f"{_STAGE_1_2}.reset_cpu_buffers(self)",
        "discarding gradients in host memory forgets their norms as an update does",
        need=OPTIMIZER_ON_HOST,
    ),
    read(
        "deepspeed.runtime.utils:is_model_parallel_parameter",
        "it marks parameters that are split: of the others one tensor rank alone counts in "
        "the gradient's norm",
        contains="hasattr(p, 'model_parallel') and p.model_parallel",
        names=("model_parallel",),
        need=TENSOR,
    ),
    *needed(
        EXPERTS,
        replaced(
            "deepspeed.moe.layer:MoE.set_deepspeed_parallelism"
            "(self, use_data_before_expert_parallel_=False)",
            "by a module of that class DeepSpeed sees that there are experts; its groups are made "
            "already",
        ),
        read(
            "deepspeed.moe.utils:is_moe_param",
            "it marks parameters that only some of the replicas have",
            contains="hasattr(param, 'allreduce') and (not param.allreduce)",
            names=("allreduce",),
        ),
        *(
            read(
                f"deepspeed.utils.groups:{table}",
                "the groups over which experts are exchanged, partitioned and averaged, by the "
                "name of a parameter group",
                contains=f"{table} = {{}}",
            )
            for table in (
                "_EXPERT_PARALLEL_GROUP",
                "_EXPERT_PARALLEL_GROUP_RANKS",
                "_EXPERT_DATA_PARALLEL_GROUP",
                "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
            )
        ),
        read(
            f"{_ENGINE}._reduce_expert_gradients",
            "experts have seen the tokens of all replicas: their gradients are divided by the "
            "number of these, though summed over fewer",
            contains="dp_world_size = dist.get_world_size(groups._get_data_parallel_group())",
            names=("group_name",),
        ),
        read(
            f"{_STAGE_1_2}._configure_moe_settings",
            "parameter groups of experts are partitioned over the replicas that have them",
            contains="self.real_dp_process_group[i] = self.expert_dp_process_group[group['name']]",
            names=("moe",),
        ),
        read(
            f"{_STAGE_3}._autoep_expert_parallel_group",
            "the same at stage 3, where they are divided and their norms summed by this mark",
            contains="families != {'autoep_expert'}",
            names=("ds_zero_placement_family", "ds_zero_partition_group_name"),
        ),
        read(
            "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
            "experts are partitioned over the replicas that have them",
            contains="getattr(param, 'ds_zero_partition_process_group', self.ds_process_group)",
            names=("ds_zero_partition_process_group",),
        ),
    ),
    read(
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.update_scale",
        "the loss scale of fp16 goes on where a checkpoint has it",
        contains="self.cur_scale",
        names=("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"),
        need=FP16,
    ),
    *needed(
        SEQUENCE,
        called(
            "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.__init__"
            "(self, attn, batch_size, attn_head_count, attn_head_size, kv_head_count, "
            "num_hidden_layers, process_group, seq_length_is_variable=False, "
            "local_seq_length=None, global_seq_length=None, disable_in_eval=False)",
            "attention over the whole sequence, put around transformers' function by trainctl, "
            "since DeepSpeed's own registration takes a model's name or class",
            names=("core_attn_implementation",),
        ),
        called(
            "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.forward"
            "(self, module, query, key, value, attention_mask, *args, **kwargs)",
            "attention over the whole sequence, with no mask of this rank's part",
        ),
    ),
)

DEEPSPEED = Table("deepspeed", ("0.19.8",), USES, DEEPSPEED_JSON)
