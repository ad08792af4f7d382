"""Rules of ZeRO, offload and checkpoints: TC028 to TC040, TC075, TC076, TC093."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

ENTRIES: dict[str, RuleText] = {
    "TC028": RuleText(
        "The moving average is one more copy beside the fp32 master weights, on the device or in "
        "host memory; evaluation swaps the two. DeepSpeed's swapper to NVMe knows Adam's tensors "
        "only.",
        "offload=cpu in place of NVMe, or training.ema_decay=null.",
        "recipe=tiny zero_stage=3 training.ema_decay=0.99 offload.optimizer=nvme "
        "offload.nvme_path=/local_nvme",
    ),
    "TC030": RuleText(
        "A pipeline accumulates gradients over many micro-batches; stages 2 and 3 would reduce "
        "and free them after each, which DeepSpeed refuses once the processes run.",
        "zero_stage=1 beside pipeline stages.",
        "recipe=tiny zero_stage=2 parallelism.pipeline=2",
    ),
    "TC031": RuleText(
        "Without ZeRO, DeepSpeed clips by a norm that misses the other stages, the other tensor "
        "ranks' shards, or the experts. It says nothing, and clips too little.",
        "zero_stage=1, which has the true norm.",
        situation="A model with experts in bf16, `zero_stage=0 parallelism.expert=2`",
        message="zero_stage.stage=0 with parallelism.expert=2 in bf16 would clip by a gradient "
        "norm without experts",
    ),
    "TC032": RuleText(
        "Parameters can wait on the host only where they are sharded, which is stage 3; optimizer "
        "states from stage 1 on. DeepSpeed ignores the rest, and the run needs the memory that "
        "was to be saved.",
        "A higher zero_stage, or no offload.",
        "recipe=tiny offload.parameters=cpu",
    ),
    "TC033": RuleText(
        "What is offloaded to NVMe is read and written every step; on a network drive, or "
        "nowhere, that fails after the model was loaded.",
        "offload.nvme_path: a folder on a local drive of every node.",
        "recipe=tiny zero_stage=3 offload.optimizer=nvme",
    ),
    "TC034": RuleText(
        "States in host memory are updated there, by a kernel for the CPU, which DeepSpeed has "
        "for Adam, Adagrad and Lion.",
        "optimizer=adamw, or no offload.",
        "recipe=tiny zero_stage=3 optimizer=lamb offload.optimizer=cpu script=train.py",
        files={"train.py": ""},
    ),
    "TC035": RuleText(
        "ZenFlow and SuperOffload are ways to update offloaded states while the device goes on. "
        "Without what they build on, DeepSpeed ignores them or fails in the first step.",
        "The base that the message names, or leave the variant out.",
        "recipe=tiny offload.zenflow=true",
    ),
    "TC036": RuleText(
        "DeepSpeed aligns each partition to 2 elements, and refuses a bucket that is not.",
        "An even number.",
        "recipe=tiny zero_stage.allgather_bucket_size=1001",
    ),
    "TC037": RuleText(
        "hpZ keeps a second copy of the weights inside each machine, so that backward gathers do "
        "not cross the network. Groups that span machines, or hold different tensor shards, would "
        "undo it.",
        "A divisor of the devices of a node, with parallelism.tensor=1.",
        "recipe=tiny zero_stage=3 zero_stage.hpz_partition_size=2 parallelism.tensor=2",
    ),
    "TC038": RuleText(
        "The kernels that quantise what is communicated are CUDA code.",
        "Leave zero_stage.quantized_* out on other devices.",
        "recipe=tiny zero_stage=3 zero_stage.quantized_weights=true",
    ),
    "TC039": RuleText(
        "Muon orthogonalises whole matrices, so at stage 3 it gathers gradients itself; a reduce "
        "scatter would leave it slices.",
        "zero_stage.reduce_scatter=false, or zero_stage=2.",
        "recipe=tiny zero_stage=3 optimizer=muon script=train.py",
        files={"train.py": ""},
    ),
    "TC040": RuleText(
        "Weights were to be saved beside the checkpoints, and the run ends before the first time.",
        "A shorter interval, or leave it out.",
        "recipe=tiny checkpoint.weights_only_every_steps=200",
    ),
    "TC075": RuleText(
        "The best checkpoint is the one with the lowest value of a metric of the evaluation, "
        "which has to be measured.",
        "checkpoint.best_of=loss, with training.evaluate_every_steps.",
        "recipe=tiny checkpoint.best_of=accuracy",
    ),
    "TC076": RuleText(
        "A run that saves nothing can only be started again from step 0, and leaves no model.",
        "checkpoint.every_steps, every_minutes or at_end.",
        "recipe=tiny checkpoint.at_end=false checkpoint.every_steps=null",
    ),
    "TC093": RuleText(
        "A rewind goes back to the newest checkpoint. Without one on the way there is nothing to "
        "go back to, and the first spike would stop the run.",
        "checkpoint.every_steps or every_minutes; how often is how much a rewind costs.",
        "recipe=tiny stability.on_bad_loss=rewind checkpoint.every_steps=null",
    ),
}
