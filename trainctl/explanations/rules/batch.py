"""Rules of the batch, the run length and its schedule: TC020 to TC027, TC062 to TC067."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

ENTRIES: dict[str, RuleText] = {
    "TC020": RuleText(
        "The global batch is micro-batch times accumulation times data-parallel ranks, all whole "
        "numbers. A batch that is rounded in silence is another run, with another curve.",
        "One of the batches that the message names; or leave micro-batch or accumulation out, and "
        "it is derived.",
        "recipe=tiny training.global_batch_size=20",
    ),
    "TC021": RuleText(
        "Beyond max_position_embeddings a learned position table has no row, and rotary positions "
        "were never trained.",
        "A shorter sequence; or a longer model.max_position_embeddings where you train the "
        "positions (and model.rope_scaling for a model that is extended).",
        "recipe=tiny training.sequence_length=4096",
    ),
    "TC022": RuleText(
        "The schedule, the checkpoints and the time all follow from the length of the run, so "
        "there is no default for it.",
        "training.steps, training.tokens or training.epochs.",
        "recipe=tiny training.steps=null",
    ),
    "TC023": RuleText(
        "stop_after_steps stops a run early while its schedule stays that of the whole. Beyond "
        "the end it stops nothing.",
        "Leave it out, or lengthen training.steps.",
        "recipe=tiny training.stop_after_steps=200",
    ),
    "TC024": RuleText(
        "The learning rate rises over the whole run and never reaches optimizer.lr. Mostly a "
        "warmup that was written for a long run, in a short trial of it.",
        "A shorter warmup, or schedule.warmup_fraction, which follows the length of the run. For "
        "a trial of a long run keep its length and set training.stop_after_steps.",
        "recipe=tiny schedule.warmup_steps=200",
    ),
    "TC025": RuleText(
        "Some schedules need one number more: an exponential decay has to end above 0, a "
        "staircase has an interval.",
        "The value that the message names.",
        "recipe=tiny schedule=exponential schedule.floor_ratio=0",
    ),
    "TC026": RuleText(
        "A global batch in tokens becomes whole sequences, as many on each rank, and has to agree "
        "with the micro-batch and its accumulation where both are given.",
        "A multiple of sequence length times ranks needs no rounding.",
        "recipe=tiny training.global_batch_tokens=20000",
    ),
    "TC027": RuleText(
        "training.deterministic sets variables that make sums keep their order, before torch is "
        "loaded. Another value of the same variable would undo it in silence.",
        "Leave the variable to trainctl; deepcompile does not go with it.",
        "recipe=tiny training.deterministic=true "
        "launcher.environment.CUBLAS_WORKSPACE_CONFIG=':0:0'",
    ),
    "TC062": RuleText(
        "A drop behind the end of the run never comes, and drops out of order were mistyped.",
        "Ascending milestones inside the run; milestone_fractions follow its length.",
        "recipe=tiny schedule=milestones schedule.milestones=[50,100,200]",
    ),
    "TC063": RuleText(
        "The plateau schedule lowers the rate when the held-out loss stalls. Nothing measures it "
        "here, so the rate would never fall.",
        "training.evaluate_every_steps and training.evaluation_samples, and text that is held out.",
        "recipe=tiny schedule=plateau training.evaluation_samples=0",
    ),
    "TC064": RuleText(
        "With lr_scaling the rate grows with the batch (linearly, or by its root) from the batch "
        "that it was tuned at. Without that batch the factor is unknown.",
        "optimizer.lr_scaling_batch_size in sequences; it is given only together with lr_scaling.",
        "recipe=tiny optimizer.lr_scaling=linear",
    ),
    "TC065": RuleText(
        "A ramp begins with a small batch and grows. Each of its batches is made of the same "
        "micro-batches on the same ranks, so it is a multiple of their product.",
        "Multiples of micro-batch times data-parallel ranks, ascending, ending inside the run.",
        "recipe=tiny training.global_batch_size=16 'training.batch_ramp=[{until_steps: 5, "
        "global_batch_size: 12}]'",
    ),
    "TC066": RuleText(
        "A decay that is longer than what warmup leaves is cut: the learning rate peaks late and "
        "falls at once.",
        "A shorter decay, or schedule.decay_fraction.",
        "recipe=tiny schedule=wsd schedule.warmup_steps=10 schedule.decay_steps=159",
    ),
    "TC067": RuleText(
        "How many steps an epoch has depends on the corpus. `launch` reads and counts it; a plan "
        "reads nothing, and the text of your own function is known to that alone.",
        "training.epoch_tokens=NUMBER, or training.tokens.",
        "recipe=tiny training.steps=null training.epochs=2 data.factory=own:texts",
        files={"own.py": "def texts(plan):\n    return ['Some text.'], []\n"},
    ),
}
