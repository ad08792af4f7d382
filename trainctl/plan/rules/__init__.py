"""Every rule of a plan, in one list: a small function each, with a stable identifier.

A rule looks at a `Draft` and yields findings; it never stops the others, so that all problems of a
configuration are reported at once. What DeepSpeed's JSON shows is one rule over any JSON, told here
by the keys of the configuration (`on_json`).
"""

from __future__ import annotations

from dataclasses import replace

from trainctl.errors import Finding
from trainctl.plan import deepspeed_rules as json
from trainctl.plan.rules import (
    architecture,
    batch,
    data,
    deterministic,
    engine,
    escape,
    experts,
    kernels,
    layout,
    mup,
    no_effect,
    optimizer,
    precision,
    quality,
    recompute,
    run,
    stability,
    zero,
)
from trainctl.plan.rules.draft import Draft, Rule, on_json

RULES: tuple[tuple[str, Rule], ...] = (
    ("TC001", layout.devices_fill_the_mesh),
    ("TC002", layout.tensor_group_stays_in_a_node),
    ("TC003", layout.heads_split_over_tensor),
    ("TC004", layout.heads_split_over_sequence),
    ("TC005", layout.sequence_splits_evenly),
    ("TC006", layout.stages_have_layers),
    ("TC007", layout.pipeline_is_filled),
    ("TC008", layout.pipeline_without_sequence),
    ("TC009", experts.experts_are_shared_out),
    ("TC010", layout.attention_kernel_runs_here),
    ("TC011", layout.vocabulary_splits_over_tensor),
    ("TC012", layout.attention_sees_the_whole_sequence),
    ("TC013", layout.listed_stages_fit),
    ("TC014", layout.parallelism_knows_the_architecture),
    ("TC015", mup.mup_has_a_base),
    ("TC016", mup.mup_knows_the_model),
    ("TC017", mup.mup_knows_the_optimizer),
    ("TC018", mup.elements_have_the_size_of_the_base),
    ("TC020", batch.batch_is_possible),
    ("TC021", batch.sequence_fits_the_model),
    ("TC022", batch.run_has_a_length),
    ("TC023", batch.stop_is_inside_the_run),
    ("TC024", batch.warmup_fits_the_run),
    ("TC025", batch.schedule_is_defined),
    ("TC026", batch.batch_tokens_are_whole_sequences),
    ("TC027", deterministic.sums_keep_their_order),
    ("TC028", run.average_can_be_kept),
    ("TC030", on_json(json.engine.pipelines_keep_their_gradients)),
    ("TC031", zero.shards_clip_by_one_norm),
    ("TC032", zero.offload_has_its_stage),
    ("TC033", on_json(json.offload.nvme_has_a_path)),
    ("TC034", zero.offloaded_optimizer_has_a_cpu_kernel),
    ("TC035", zero.offload_variants_have_their_base),
    ("TC036", on_json(json.zero.the_gather_bucket_is_even)),
    ("TC037", zero.secondary_partition_divides),
    ("TC038", on_json(json.zero.quantized_communication_has_a_kernel)),
    ("TC039", on_json(json.optimizer.muon_sees_whole_gradients)),
    ("TC040", run.weights_are_saved_before_the_end),
    ("TC050", precision.compute_type_runs_here),
    ("TC051", precision.gradients_accumulate_in_a_wider_type),
    ("TC052", precision.gradients_travel_in_a_known_type),
    ("TC053", precision.autocast_has_a_lower_type),
    ("TC054", precision.master_weights_are_kept_in_a_known_type),
    ("TC055", on_json(json.optimizer.lamb_adapts_its_loss_scale)),
    ("TC056", on_json(json.optimizer.the_optimizer_has_a_kernel)),
    ("TC057", precision.loss_is_scaled_where_deepspeed_does),
    ("TC058", precision.fp8_has_matrices_that_fit),
    ("TC059", optimizer.optimizer_fits_the_layout),
    ("TC060", optimizer.groups_match_parameters),
    ("TC061", optimizer.fused_kernel_is_there),
    ("TC062", batch.milestones_are_in_the_run),
    ("TC063", batch.plateau_is_measured),
    ("TC064", optimizer.scaled_rate_has_its_batch),
    ("TC065", batch.ramp_is_possible),
    ("TC066", batch.decay_fits_the_run),
    ("TC067", batch.epoch_has_a_length),
    ("TC069", stability.gradients_are_seen),
    ("TC070", run.model_has_its_directory),
    ("TC071", run.heads_share_the_width),
    ("TC072", run.vocabulary_holds_the_tokenizer),
    ("TC073", run.tokenizer_has_its_file),
    ("TC074", run.data_has_its_files),
    ("TC075", run.best_is_measured),
    ("TC076", run.something_is_saved),
    ("TC077", run.launcher_reaches_the_nodes),
    ("TC078", run.log_level_is_known),
    ("TC079", run.factored_states_stay_factored),
    ("TC080", run.profiler_has_a_window),
    ("TC081", recompute.some_block_is_recomputed),
    ("TC083", recompute.partitioned_inputs_are_copies),
    ("TC084", recompute.offloaded_inputs_leave_the_device),
    ("TC085", kernels.liger_runs_here),
    ("TC086", kernels.loss_sees_the_hidden_states),
    ("TC087", kernels.compiler_sees_whole_blocks),
    ("TC088", kernels.deepcompile_runs_here),
    ("TC089", run.names_of_the_launcher_are_names),
    ("TC090", escape.pass_through_keys_exist),
    ("TC091", escape.pass_through_has_no_auto),
    ("TC092", escape.pass_through_agrees),
    ("TC093", stability.rewinding_has_a_checkpoint),
    ("TC094", run.model_has_a_shape),
    ("TC099", no_effect.settings_have_an_effect),
    ("TC144", run.weights_have_one_source),
    ("TC153", architecture.architecture_has_the_attention),
    ("TC155", experts.experts_are_kept_busy),
    ("TC195", precision.loss_scale_starts_above_its_least),
    ("TC340", data.sources_have_their_share),
    ("TC341", data.run_of_sources_has_a_length),
    ("TC342", data.stages_follow_each_other),
    ("TC343", data.stages_know_their_sources),
    ("TC344", data.batches_keep_their_tokens),
    ("TC349", data.lengths_suit_the_engine),
    ("TC353", quality.copies_can_be_found),
    ("TC354", quality.precedence_knows_its_sources),
    ("TC355", quality.what_is_looked_for_is_held_out),
    ("TC356", quality.filters_keep_something),
    ("TC357", quality.chosen_documents_are_whole),
    ("TC361", data.ids_are_no_text),
    ("TC362", data.bins_have_one_length),
    ("TC363", data.infilling_has_its_tokens),
    ("TC365", data.stream_has_its_place),
    ("TC370", architecture.state_ends_with_its_document),
    ("TC375", kernels.tiles_are_of_dense_layers),
    ("TC390", experts.expert_axis_goes_with_the_rest),
    ("TC391", experts.balance_is_that_of_whole_sequences),
    ("TC405", engine.engine_has_what_is_asked),
)
"""Identifiers are never reused; leave a gap where a rule is dropped."""


def check(draft: Draft) -> tuple[Finding, ...]:
    """Findings of every rule, in the order of the list."""
    return tuple(
        replace(finding, rule=identifier) for identifier, rule in RULES for finding in rule(draft)
    )


__all__ = ["RULES", "Draft", "Rule", "check"]
