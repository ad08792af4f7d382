"""Table of trainctl's changes to DeepSpeed, and of undocumented parts that it uses."""

from __future__ import annotations

from trainctl.engines.patches import (
    DEEPSPEED_JSON,
    EXPERTS,
    FP16,
    OPTIMIZER_ON_HOST,
    OPTIMIZER_ON_NVME,
    OWN_NORM,
    PARAMETERS_ON_NVME,
    PART_OFFLOADED,
    PARTITIONED,
    PIPELINE,
    SEQUENCE,
    STAGE_3,
    STAGES_1_2,
    TENSOR,
    ZENFLOW,
    Table,
    Use,
    UseKind,
)

_CHANGES = "trainctl.engines.deepspeed.changes"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_ZENFLOW = "deepspeed.runtime.zenflow.zenflow_stage_1_and_2:ZenFlowZeroOptimizer"
_PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"

USES = (
    # Process-wide changes.
    Use(
        target="deepspeed.comm.torch:build_shm_op",
        how=UseKind.replaced,
        why="it compiles an all-reduce for the CPU at the start of each process that has none; "
        "trainctl takes gloo's, which knows groups",
        contains="deepspeed.ops.__compatible_ops__.get(builder.NAME, False)",
        names=("__compatible_ops__",),
        apply=f"{_CHANGES}:disable_shm_allreduce",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/7625",
    ),
    Use(
        target="deepspeed.runtime.compiler:compile",
        how=UseKind.replaced,
        why="each optimizer imports DeepSpeed's Muon, which has torch's compiler imported by it: a "
        "second of a rank's start, for two functions that trainctl never calls",
        signature="()",
        apply=f"{_CHANGES}:leave_muon_uncompiled",
        fallback="ranks may start a second later",
    ),
    Use(
        target="deepspeed.runtime.zero.partition_parameters:_no_gather_coalesced",
        how=UseKind.replaced,
        why="a parameter read from NVMe lies in a buffer that the next one is read into, and a "
        "recomputed block still holds it: its gradient was off by some percent",
        body="68ab770ab3b7",
        need=PARAMETERS_ON_NVME,
        apply=f"{_CHANGES}:copy_from_swap_buffers",
    ),
    Use(
        target=f"{_STAGE_1_2}._update_model_bit16_weights",
        how=UseKind.replaced,
        why="ZenFlow's flat buffers hold matrices transposed, and the model's weights are cut out "
        "of them as if they did not: every matrix is scrambled",
        body="709523950358",
        need=ZENFLOW,
        apply=f"{_CHANGES}:cut_out_transposed_weights",
    ),
    Use(
        target=f"{_ZENFLOW}.sync_fp32_param_from_gpu",
        how=UseKind.replaced,
        why="each choice of columns rounds all master weights to the weights' format, where only "
        "those of the updated columns are out of date",
        body="05903b4e0c77",
        need=ZENFLOW,
        apply=f"{_CHANGES}:settle_updated_masters_only",
    ),
    # Changes and uses of one engine.
    Use(
        target=f"{_ZENFLOW}._sync_selective_optimizer_lr",
        how=UseKind.called,
        why="the device's part makes its update in the backward pass, with the rate of the step "
        "before unless it is told earlier",
        signature="(self)",
        need=ZENFLOW,
    ),
    Use(
        target=f"{_ZENFLOW}.is_zenflow_select_boundary",
        how=UseKind.read,
        why="a resumed run has no moments of the columns on the device: they are chosen anew",
        contains="self.micro_step - self.full_warm_up_rounds == 0",
        names=("micro_step", "full_warm_up_rounds"),
        need=ZENFLOW,
    ),
    Use(
        target=f"{_STAGE_1_2}.scaled_global_norm",
        how=UseKind.replaced,
        why="it takes the norm of one parameter group after the other over the stages, and waits "
        "for ever where one stage has more of them; of experts trainctl's own is certain",
        signature="(self, norm_type=2)",
        need=OWN_NORM,
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/1522",
    ),
    Use(
        target=f"{_PIPELINE}._exec_schedule",
        how=UseKind.read,
        why="the update waits until all ranks have seen that the loss is finite, and the parts of "
        "a step are timed",
        contains="MethodType(self._INSTRUCTION_MAP[type(cmd)], self)",
        names=("_INSTRUCTION_MAP",),
        need=PIPELINE,
    ),
    Use(
        target=f"{_PIPELINE}._exec_optimizer_step",
        how=UseKind.called,
        why="the update, when all ranks have seen that the loss is finite",
        signature="(self, lr_kwargs=None)",
        need=PIPELINE,
    ),
    Use(
        target=f"{_PIPELINE}._exec_forward_pass",
        how=UseKind.read,
        why="an evaluation adds its loss to whatever the last one left there",
        contains="self.total_loss = add_to_total_loss(self.total_loss, self.loss)",
        names=("total_loss",),
        need=PIPELINE,
    ),
    Use(
        target=f"{_STAGE_1_2}.step",
        how=UseKind.replaced,
        why="for a step whose gradients are discarded: DeepSpeed counts it and makes no update",
        signature="(self, closure=None)",
        names=("overflow", "micro_step_id", "_offload_accumulated_param_ids"),
        need=STAGES_1_2,
    ),
    Use(
        target=f"{_STAGE_3}.step",
        how=UseKind.replaced,
        why="for a step whose gradients are discarded: DeepSpeed counts it and makes no update",
        signature="(self, closure=None)",
        names=("overflow",),
        need=STAGE_3,
    ),
    Use(
        target=f"{_BF16}.step",
        how=UseKind.replaced,
        why="for a step whose gradients are discarded: DeepSpeed counts it and makes no update",
        signature="(self, closure=None)",
        names=("overflow",),
        need=PARTITIONED,
    ),
    Use(
        target=f"{_STAGE_3}._pre_step",
        how=UseKind.called,
        why="discarding gradients begins as an update does",
        signature="(self)",
        need=STAGE_3,
    ),
    Use(
        target=f"{_STAGE_3}._overflow_clean_up",
        how=UseKind.called,
        why="it drops the gradients of a step, wherever they are",
        signature="(self, prev_scale)",
        need=STAGE_3,
    ),
    Use(
        target=f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters",
        how=UseKind.called,
        why="parameters follow the master weights of a checkpoint that is loaded into a running "
        "engine",
        signature="(self, sub_group_id)",
        need=STAGE_3,
    ),
    Use(
        target=f"{_STAGE_3}._swappable_optimizer_subgroup",
        how=UseKind.called,
        why="which of the optimizer's tensors are on NVMe",
        signature="(self, sub_group_id)",
        need=STAGE_3,
    ),
    Use(
        target=f"{_STAGE_3}._optimizer_states_and_gradient_swap_in",
        how=UseKind.called,
        why="states on NVMe are read to be saved, loaded, or to change a gradient",
        signature="(self, sub_group_id, timer_names=None)",
        need=OPTIMIZER_ON_NVME,
    ),
    Use(
        target=f"{_STAGE_3}._optimizer_states_and_gradient_swap_out",
        how=UseKind.called,
        why="states on NVMe are written that a checkpoint brought",
        signature="(self, sub_group_id, timer_names=None)",
        need=OPTIMIZER_ON_NVME,
    ),
    Use(
        target=f"{_STAGE_3}._release_swap_buffers",
        how=UseKind.called,
        why="states on NVMe that were only read are not written again",
        signature="(self, sub_group_id)",
        need=OPTIMIZER_ON_NVME,
    ),
    Use(
        target=f"{_STAGE_3}._writeback_swap_state",
        how=UseKind.called,
        why="a changed gradient is written back without the states",
        signature="(self, sub_group_id, write_opt_state, write_gradients)",
        need=OPTIMIZER_ON_NVME,
    ),
    Use(
        target=f"{_STAGE_3}.__init__",
        how=UseKind.read,
        why="the first group of the device's part keeps its first learning rate, unlike the "
        "others: it is made to share the host's groups",
        contains="self.backup_optimizer.add_param_group(self.optimizer.param_groups[i])",
        names=("backup_optimizer",),
        need=PART_OFFLOADED,
    ),
    Use(
        target=f"{_STAGE_1_2}._wait_for_offload_copies",
        how=UseKind.called,
        why="gradients are looked at when they have arrived in host memory",
        signature="(self)",
        need=STAGES_1_2,
    ),
    Use(
        target=f"{_STAGE_1_2}._release_preflattened_grad_buffers",
        how=UseKind.called,
        why="discarding gradients frees their buffers as an update does",
        signature="(self, group_idx=None)",
        need=STAGES_1_2,
    ),
    Use(
        target=f"{_STAGE_1_2}.reset_cpu_buffers",
        how=UseKind.called,
        why="discarding gradients in host memory forgets their norms as an update does",
        signature="(self)",
        need=OPTIMIZER_ON_HOST,
    ),
    Use(
        target="deepspeed.utils.mixed_precision_linkage:link_hp_params",
        how=UseKind.read,
        why="which part of a parameter lies where in this rank's master weights",
        contains="lp_param._hp_mapping = get_hp_fragment_mapping(",
        names=("_hp_mapping",),
        need=PARTITIONED,
    ),
    Use(
        target="deepspeed.utils.groups:_get_zero_param_intra_parallel_group",
        how=UseKind.called,
        why="`zero.Init` without it keeps no copy of the parameters within a node (ZeRO++)",
        signature="()",
        need=STAGE_3,
    ),
    Use(
        target="deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
        how=UseKind.read,
        why="the copy within a node of weights that are not set yet is dropped (ZeRO++); the next "
        "gathering makes it anew",
        contains="param.ds_secondary_tensor = None",
        names=("ds_secondary_tensor",),
        need=STAGE_3,
    ),
    Use(
        target="deepspeed.runtime.utils:is_model_parallel_parameter",
        how=UseKind.read,
        why="it marks parameters that are split: of the others one tensor rank alone counts in "
        "the gradient's norm",
        contains="hasattr(p, 'model_parallel') and p.model_parallel",
        names=("model_parallel",),
        need=TENSOR,
    ),
    Use(
        target="deepspeed.runtime.constants:PIPE_REPLICATED",
        how=UseKind.read,
        why="it marks a tied weight on the last stage: the first one counts it in the gradient's "
        "norm",
        contains="PIPE_REPLICATED = 'ds_pipe_replicated'",
        names=("ds_pipe_replicated",),
        need=PIPELINE,
    ),
    Use(
        target="deepspeed.moe.layer:MoE.set_deepspeed_parallelism",
        how=UseKind.replaced,
        why="by a module of that class DeepSpeed sees that there are experts; its groups are made "
        "already",
        signature="(self, use_data_before_expert_parallel_=False)",
        need=EXPERTS,
    ),
    Use(
        target="deepspeed.moe.utils:is_moe_param",
        how=UseKind.read,
        why="it marks parameters that only some of the replicas have",
        contains="hasattr(param, 'allreduce') and (not param.allreduce)",
        names=("allreduce",),
        need=EXPERTS,
    ),
    *(
        Use(
            target=f"deepspeed.utils.groups:{table}",
            how=UseKind.read,
            why="the groups over which experts are exchanged, partitioned and averaged, by the "
            "name of a parameter group",
            contains=f"{table} = {{}}",
            need=EXPERTS,
        )
        for table in (
            "_EXPERT_PARALLEL_GROUP",
            "_EXPERT_PARALLEL_GROUP_RANKS",
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        )
    ),
    Use(
        target=f"{_ENGINE}._reduce_expert_gradients",
        how=UseKind.read,
        why="experts have seen the tokens of all replicas: their gradients are divided by the "
        "number of these, though summed over fewer",
        contains="dp_world_size = dist.get_world_size(groups._get_data_parallel_group())",
        names=("group_name",),
        need=EXPERTS,
    ),
    Use(
        target=f"{_STAGE_1_2}._configure_moe_settings",
        how=UseKind.read,
        why="parameter groups of experts are partitioned over the replicas that have them",
        contains="self.real_dp_process_group[i] = self.expert_dp_process_group[group['name']]",
        names=("moe",),
        need=EXPERTS,
    ),
    Use(
        target=f"{_STAGE_3}._autoep_expert_parallel_group",
        how=UseKind.read,
        why="the same at stage 3, where they are divided and their norms summed by this mark",
        contains="families != {'autoep_expert'}",
        names=("ds_zero_placement_family", "ds_zero_partition_group_name"),
        need=EXPERTS,
    ),
    Use(
        target="deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
        how=UseKind.read,
        why="experts are partitioned over the replicas that have them",
        contains="getattr(param, 'ds_zero_partition_process_group', self.ds_process_group)",
        names=("ds_zero_partition_process_group",),
        need=EXPERTS,
    ),
    Use(
        target=f"{_ENGINE}.is_gradient_accumulation_boundary",
        how=UseKind.read,
        why="it takes a step's end for a multiple of the accumulation steps, which a ramp of the "
        "batch changes",
        contains="(self.micro_steps + 1) % self.gradient_accumulation_steps() == 0",
        names=("micro_steps",),
    ),
    Use(
        target=f"{_STAGE_3}.unscale_and_clip_grads",
        how=UseKind.read,
        why="what gradients are clipped at is set before each update",
        contains="self.clip_grad > 0.0",
        names=("clip_grad",),
        need=STAGE_3,
    ),
    Use(
        target=f"{_STAGE_1_2}.unscale_and_clip_grads",
        how=UseKind.read,
        why="what gradients are clipped at is set before each update",
        contains="self.clip_grad > 0.0",
        names=("clip_grad",),
        need=STAGES_1_2,
    ),
    Use(
        target="deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.update_scale",
        how=UseKind.read,
        why="the loss scale of fp16 goes on where a checkpoint has it",
        contains="self.cur_scale",
        names=("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"),
        need=FP16,
    ),
    Use(
        target="deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.__init__",
        how=UseKind.called,
        why="attention over the whole sequence, put around transformers' function by trainctl, "
        "since DeepSpeed's own registration takes a model's name or class",
        signature="(self, attn, batch_size, attn_head_count, attn_head_size, kv_head_count, "
        "num_hidden_layers, process_group, seq_length_is_variable=False, local_seq_length=None, "
        "global_seq_length=None, disable_in_eval=False)",
        names=("core_attn_implementation",),
        need=SEQUENCE,
    ),
    Use(
        target="deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.forward",
        how=UseKind.called,
        why="attention over the whole sequence, with no mask of this rank's part",
        signature="(self, module, query, key, value, attention_mask, *args, **kwargs)",
        need=SEQUENCE,
    ),
)

DEEPSPEED = Table("deepspeed", ("0.19.8",), USES, DEEPSPEED_JSON)
