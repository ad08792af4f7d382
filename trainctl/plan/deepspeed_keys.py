"""Keys of DeepSpeed 0.19's JSON: what it reads, what it has removed, what trainctl owns.

DeepSpeed ignores a top-level key that it does not know, so the list is closed here; a test compares
it with the installed version.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL_KEYS = _words(
    """
    activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger
    communication_data_type compile csv_monitor data_efficiency data_parallel_size data_types
    dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level
    managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """
)
"""Every top-level key that something in DeepSpeed reads."""

REMOVED_TOP_LEVEL_KEYS = _words(
    """
    amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula
    progressive_layer_drop quantize_training sparse_attention sparse_gradients
    """
)
"""Refused by DeepSpeed since 0.19.8 (runtime/config.py)."""

ZERO_KEYS = _words(
    """
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients
    elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1
    load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear offload_optimizer
    offload_param overlap_comm override_module_apply parameter_alignment
    pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
    """
)
"""Keys of `zero_optimization`, by the names that the JSON has; deprecated ones left out."""

REMOVED_ZERO_KEYS = _words("mics_hierarchical_params_gather mics_shard_size zeropp_loco_param")
"""Refused in `zero_optimization` since 0.19.8."""

OWNED_KEYS = {
    "scheduler": "the trainer sets the learning rate at each step: use the schedule group",
    "data_parallel_size": "it is derived from the devices: use parallelism.data",
    "optimizer": "use the optimizer group",
    "expert_parallel": "use parallelism.expert",
}
"""Keys that would work against trainctl even where it does not write them, and what to use."""
