"""Rules of the mesh, expert parallelism and muP: TC001 to TC018, TC390, TC391, TC400."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

ENTRIES: dict[str, RuleText] = {
    "TC001": RuleText(
        "Every device has one place in the mesh; what the three axes leave over is data parallel. "
        "Devices that do not divide would idle, or be missing.",
        "Choose axes whose product divides the devices, or other hardware.",
        "recipe=tiny parallelism.tensor=4",
    ),
    "TC002": RuleText(
        "Tensor parallelism communicates twice in every block, forward and backward, and waits "
        "for it. Inside a machine that is NVLink; between machines it is ten times slower and "
        "more.",
        "A tensor size that divides the devices of a node; pipeline stages go between nodes.",
        "recipe=tiny hardware=2x6xh100-80g launcher=slurm parallelism.tensor=4",
    ),
    "TC003": RuleText(
        "Attention is split by heads and the feed-forward layer by rows: a rank cannot have half "
        "a head.",
        "A tensor size that divides the heads, also the key-value heads of grouped-query "
        "attention.",
        "recipe=tiny parallelism.tensor=8",
    ),
    "TC004": RuleText(
        "Ulysses gives each rank all tokens of some heads while attention is computed, so there "
        "are no more ranks than heads.",
        "A sequence size that divides the heads; beyond it, tensor parallelism or recomputation.",
        "recipe=tiny parallelism.sequence=8",
    ),
    "TC005": RuleText(
        "A sequence is cut into equal parts, one for each rank.",
        "The next multiple of the axis as length.",
        "recipe=tiny parallelism.sequence=4 training.sequence_length=1022",
    ),
    "TC006": RuleText(
        "A stage is a row of whole blocks; one without a block would only pass tensors on.",
        "Fewer stages, or a deeper model.",
        "recipe=tiny parallelism.pipeline=8",
    ),
    "TC007": RuleText(
        "A pipeline fills and drains at every step. With few micro-batches most of the step is "
        "that, and devices wait.",
        "More micro-batches in a step: a smaller training.micro_batch_size or a larger global "
        "batch; four times the stages leaves about a fifth idle.",
        "recipe=tiny hardware=8xh100-80g parallelism.pipeline=4",
    ),
    "TC008": RuleText(
        "DeepSpeed's pipeline builds its groups from pipeline, data and tensor axes only.",
        "One of the two: stages for a deep model, the sequence axis for long text.",
        "recipe=tiny parallelism.pipeline=2 parallelism.sequence=2",
    ),
    "TC009": RuleText(
        "Each rank of the expert axis keeps some experts whole and sends tokens to the others. "
        "Without experts there is nothing to share out, and an uneven share would leave ranks "
        "waiting.",
        "parallelism.expert=1 for a dense model; else a size that divides the experts and the "
        "data-parallel ranks.",
        "recipe=tiny parallelism.expert=2",
    ),
    "TC010": RuleText(
        "The kernel is CUDA code for fp16 and bf16; on another device, or in fp32, it would fail "
        "in the first forward pass.",
        "model.attention=sdpa, which picks the fastest kernel that the device has.",
        "recipe=tiny model.attention=flash_attention_2",
    ),
    "TC011": RuleText(
        "The embedding and the head are split by tokens of the vocabulary.",
        "A smaller tensor axis; a real vocabulary is never this small.",
        "recipe=tiny parallelism.tensor=4 model.vocab_size=5 model.num_key_value_heads=4",
    ),
    "TC012": RuleText(
        "A rank of the sequence axis has a part of the text, so a mask made there speaks of that "
        "part only. The kernel must know by itself what a token may see: sdpa knows plain causal "
        "attention, FlashAttention also documents and windows.",
        "model.attention=sdpa, or flash_attention_2 where documents are masked.",
        "recipe=tiny parallelism.sequence=2 model.attention=eager",
    ),
    "TC013": RuleText(
        "parallelism.stage_blocks says how many blocks each stage has, and stages that do not add "
        "up to the model leave some out or ask for more than there are.",
        "As many numbers as stages, with the number of blocks as their sum; or leave it out.",
        "recipe=tiny parallelism.pipeline=2 parallelism.stage_blocks=[1,1,2]",
    ),
    "TC014": RuleText(
        "How to split a model is known of the families that trainctl has, and of architectures of "
        "transformers for which every axis was tried against one process. On another, a split may "
        "train without an error and be wrong.",
        "Data parallelism with ZeRO, which works for every model; the table of families says "
        "which axes were shown.",
        situation="A directory with code of its own (`model.trust_remote_code=true`) and "
        "`parallelism.sequence=2`",
        message="parallelism.sequence=2 with the phi3 architecture: code of the directory's own "
        "(model.trust_remote_code) was not tried",
    ),
    "TC015": RuleText(
        "muP scales from a narrow model on which the learning rate was tuned. Without its width "
        "all factors would be 1, and the setting would do nothing.",
        "model.mup_base_width: the hidden size of the model that was tuned.",
        "recipe=tiny model.mup=true",
    ),
    "TC016": RuleText(
        "Which tensor grows with the width in which dimension has to be known to scale its first "
        "weights and its learning rate.",
        "A model of the listed families, trained from the beginning; or model.mup=false.",
        situation="`model=hf` on a directory of bloom, with `model.mup=true "
        "model.mup_base_width=64`",
        message="model.mup=true with model.family=hf (bloom): which of its tensors grow with the "
        "width is not known",
    ),
    "TC017": RuleText(
        "The rules are derived for one kind of update. A step that is normalised by each tensor "
        "(LAMB, Adafactor) is of another size already, and no transfer has been shown.",
        "optimizer=adamw, or another that the table of optimizers marks.",
        "recipe=tiny optimizer=lamb model.mup=true model.mup_base_width=64",
    ),
    "TC018": RuleText(
        "At width m times the base's, single elements of a gradient are 1/m as large. A limit or "
        "a noise that is set for elements was right for one width only.",
        "Divide what was right on the base by the factor of the widths.",
        "recipe=tiny model.mup=true model.mup_base_width=64 gradients.clip_value=0.1",
    ),
    "TC390": RuleText(
        "A layout counts as supported when its losses were those of one process. Experts beside "
        "some axes were not, or cannot be: a shard would have to be cut along two dimensions.",
        "The other axis at 1, or parallelism.expert=1.",
        situation="A model with 8 experts, `parallelism.expert=2 parallelism.tensor=2`",
        message="parallelism.tensor=2 with parallelism.expert=2: a shard of a parameter is cut "
        "along one dimension, and experts are along theirs",
    ),
    "TC391": RuleText(
        "A balancing loss is a mean over all tokens of a sequence and over all routers. A rank "
        "that sees a part would add another loss.",
        "experts.auxiliary_loss=0 with experts.bias_update, or the axis at 1.",
        situation="A model with 8 experts, `experts.auxiliary_loss=0.1 parallelism.sequence=2`",
        message="experts.auxiliary_loss=0.1 with parallelism.sequence=2: a rank does not see all "
        "that the routers make of a sequence",
    ),
    "TC400": RuleText(
        "To keep experts equally busy, their routers have to be seen: which experts a token "
        "chose. The code of some models does not show it, and some routers have no bias to move.",
        "Leave the balancing out; such a model often balances itself.",
        situation="A directory whose own code routes tokens, with `experts.auxiliary_loss=0.1`",
        message="experts.auxiliary_loss=0.1: the routers of theirs are a part of code of its own, "
        "which does not show what they choose",
    ),
}
