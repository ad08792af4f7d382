"""Fields of each kind of record in `events.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """Explanation of one kind of record."""

    when: str
    """Event that the record reports, and who writes it."""
    fields: dict[str, str]
    """Meaning of each field of its own, with its unit."""
    cure: str = ""
    """Remedy; empty for a record that only informs."""


COMMON = {
    "schema": "version of the lines, 1",
    "attempt": "the attempt that wrote it, from 1",
    "time": "when, seconds since 1970",
    "event": "the kind",
}
"""Fields that all records share."""

RECORDS = {
    "launch": Record(
        "The launcher has begun an attempt.",
        {
            "host": "its machine",
            "pid": "its process",
            "ranks": "how many ranks it starts",
        },
    ),
    "start": Record(
        "The ranks stand, and the first step comes next.",
        {
            "step": "steps that are done: above 0 after a resume",
            "total_steps": "of the whole run; the schedule goes by it",
            "stop_step": "where this attempt ends",
            "world_size": "ranks",
            "num_parameters": "of the model",
            "num_trained": "of these, what trains",
            "wrapped_blocks": "blocks whose activations are recomputed",
            "train_tokens": "tokens of text to train on",
            "held_out_tokens": "tokens that are held out",
            "unigram_entropy": "nats; the loss of who knows only how frequent each token is",
            "sources": "with data.sources: train_tokens and held_out_tokens of each",
            "conversations": "with packed conversations: how they became samples, of each source",
            "bad_text": "text that was replaced or left out, by kind",
            "resumed_from": "the checkpoint's folder; null at a first start",
            "ema_begins": "whether the average of the weights begins here, the checkpoint having "
            "none",
            "passed_over": "newer checkpoints that were not taken, and what is wrong with them",
        },
    ),
    "step": Record(
        "The first rank, after each optimizer step that counts. A step that is made again after a "
        "resume or a rewind appears again; the last one holds.",
        {
            "step": "its number, from 1",
            "loss": "over the global batch, nats a token; before the update",
            "learning_rate": "the peak rate times the schedule's factor at this step",
            "learning_rates": "of each optimizer group",
            "grad_norm": "of the gradient as it was measured; null where nobody sees it",
            "grad_norms": "the same of each optimizer group",
            "clip_at": "with gradients.adaptive_clipping: what the norm was clipped at",
            "clipped_groups": "groups that were above their own limit, and what they were "
            "multiplied by",
            "z_loss": "with stability.z_loss: what was added to the loss",
            "experts": "with experts: load (1 is even), load_by_layer, idle, entropy, losses",
            "objective": "with another objective: what it measures beside the loss",
            "intervention": "the policy by which no update was made",
            "skipped": "true where no update was made, also for an overflow in fp16",
            "loss_scale": "in fp16: that of the next step",
            "tokens": "that the run has been trained on so far",
            "tokens_per_second": "of all devices together",
            "mfu": "model FLOPs utilisation, 0 to 1; null where the device's peak is not known",
            "seconds": "where the time since the last record went: total, data, forward, backward, "
            "optimizer, checkpoint, evaluation",
            "peak_bytes": "of the first rank so far: allocated on the device, host",
            "samples": "counters of its first sample and one past its last",
            "sources": "with data.sources: samples of each",
        },
    ),
    "memory": Record(
        "The first rank, after the second step of an attempt and at its end.",
        {
            "step": "steps done",
            "at_end": "which of the two",
            "measured": "the most that any rank has used, bytes: of the device, in tensors, "
            "reserved, of the host",
            "planned": "the same by the budget, with its lower and upper bound",
            "phases": "with logging.memory_phases: both for each part of a step",
        },
        "Above the upper bound: `trainctl estimate-memory --measure` says which part, and a "
        "report of it is welcome.",
    ),
    "evaluation": Record(
        "The first rank, after held-out text was scored.",
        {
            "step": "steps done",
            "loss": "nats a token",
            "ema_loss": "with training.ema_decay: that of the averaged weights",
            "objective": "with another objective: what it measures",
            "unigram_entropy": "nats; what knowing frequencies alone would reach",
            "sources": "with data.sources: the loss of each",
        },
    ),
    "tasks": Record(
        "`trainctl evaluate --tasks`, after published tasks were done with a checkpoint.",
        {
            "checkpoint": "its name",
            "weights": "current, or the average",
            "step": "that it continues from",
            "chat": "whether questions were written by the chat template",
            "lm_eval": "version of the package",
            "results": "of each task and metric: value, stderr, samples, shots",
            "device": "that it ran on",
        },
    ),
    "checkpoint": Record(
        "A checkpoint is complete and counts.",
        {
            "step": "that it continues from",
            "path": "inside the run",
            "seconds": "that writing took",
            "stall_seconds": "of these, what training waited",
        },
    ),
    "weights": Record(
        "Weights alone were saved (`checkpoint.weights_only_every_steps`).",
        {
            "step": "that they are of",
            "path": "inside the run",
            "seconds": "that writing took",
            "stall_seconds": "of these, what training waited",
        },
    ),
    "intervention": Record(
        "All ranks agree that a step is bad, before its update.",
        {
            "step": "the step that was to be made",
            "kind": "what is wrong: `trainctl explain loss_spike` and its like",
            "value": "the loss or norm",
            "limit": "what it must not exceed; null where it is not finite",
            "policy": "what is done: `trainctl explain rewind` and its like",
            "samples": "counters of the batch's first sample and one past its last",
            "ranks": "on whose own samples the loss was bad",
            "suspects": "counters of these samples, 64 at most",
            "not_finite": "of NaN and infinity: `in` (weight, activation, gradient, or loss where "
            "none of these holds one), `names` (8 at most; gradients in the order of the backward "
            "pass), their `count`, `ranks`",
            "document": "of a stop after several in a row: a document that all the batches have "
            "parts of: source, document, file, line, batches",
            "in_a_row": "interventions before it without a good step between",
            "to_step": "of a rewind: the checkpoint's step",
            "lr_factor": "of a rewind: what the learning rate is multiplied by from now on",
        },
        "`trainctl data show RUN --samples FIRST-LAST` prints what was in them.",
    ),
    "divergence": Record(
        "The loss stays far above what the run had reached, or has come down again; a warning.",
        {
            "diverged": "which of the two",
            "step": "steps done",
            "loss": "mean of the last ten steps",
            "limit": "what all ten are above, or below",
            "times": "what the limit is, times the reference",
            "reference": "vocabulary: ln(vocabulary); best: the lowest mean of ten steps; start: "
            "the mean of the first ten",
            "learning_rate": "the rate of that step",
        },
        "Common causes, the most common first: optimizer.lr too high; too little warmup "
        "(schedule.warmup_steps); no gradient clipping (optimizer.gradient_clipping); a tokenizer "
        "that is not the model's; damaged data (`trainctl data show RUN --samples FIRST-LAST`); "
        "another stage of the data. `stability=skip` or `stability=rewind` would act on spikes.",
    ),
    "replay": Record(
        "A step that is made again has another loss than the first time.",
        {
            "step": "which",
            "loss": "of now",
            "expected": "of the first time",
            "expected_attempt": "whose",
        },
        "After a change of layout it differs by rounding. Otherwise: other text, another version "
        "of a package, another device.",
    ),
    "plateau": Record(
        "schedule=plateau lowers the learning rate.",
        {
            "step": "steps done",
            "loss": "the held-out loss",
            "drops": "how often it has fallen",
            "factor": "of the peak rate, from now on",
            "best": "the lowest held-out loss",
            "best_step": "when that was",
            "evaluations_since": "evaluations without a better one",
        },
    ),
    "straggler": Record(
        "A rank has become slower than its peers for three windows of ten steps, or caught up.",
        {
            "slow": "which of the two",
            "step": "steps done",
            "rank": "which",
            "node": "its node",
            "host": "its host",
            "part": "of the step that it loses most in",
            "seconds": "its own, of that part of a step",
            "usual_seconds": "the same of its peers",
            "factor": "its own time of a step over theirs",
        },
        "Look at the host: temperature, clocks, other processes, its network. `launcher.exclude` "
        "leaves it out at the next start.",
    ),
    "reference": Record(
        "With DPO and its like: the log-probabilities of the first weights are there.",
        {
            "step": "steps done",
            "train": "pairs to train on",
            "held_out": "pairs that are held out",
            "seconds": "that computing or reading them took",
        },
    ),
    "sample": Record(
        "At the end, text that the model writes.",
        {
            "step": "steps done",
            "prompt": "with training.sample_prompts: what it answers",
            "text": "what it wrote",
        },
    ),
    "profile": Record(
        "The profiler has written its window.",
        {"step": "the window's last", "path": "the folder, inside the run"},
    ),
    "corpus": Record(
        "A host says what should be known of the text: it is tokenized, waited for, or streamed.",
        {"message": "in words", "host": "which"},
    ),
    "build": Record(
        "DeepSpeed compiles an operator, or has.",
        {
            "operator": "its name",
            "seconds": "that it took; null when it begins",
            "node": "where",
            "host": "where",
        },
    ),
    "benchmark": Record(
        "With launcher.benchmark: what devices and network reach before the training.",
        {
            "all_reduce_gb_per_second": "of all ranks together",
            "buffer_bytes": "that were reduced",
            "speeds": "of each rank: rank, host, tflops",
            "slow": "those below 80 % of the median",
        },
    ),
    "program": Record(
        "A script or function of the user's is started.",
        {"command": "its words, secrets left out"},
    ),
    "not_joined": Record(
        "No rank of a script or function of the user's has joined a process group.",
        {"seconds": "since the ranks were started"},
        "Each rank then trains a model of its own. A script opens the group by "
        "`deepspeed.init_distributed()`, `torch.distributed.init_process_group()` or "
        "`Accelerator()`; one that meets elsewhere than at `MASTER_ADDR` and `MASTER_PORT` is not "
        "seen.",
    ),
    "waiting": Record(
        "A restart waits for nodes.",
        {"there": "how many answer", "of": "how many there are", "missing": "the others' names"},
        "launcher.min_nodes goes on without them; launcher.node_wait_seconds is how long it waits.",
    ),
    "preempted": Record(
        "An agent was asked to end by the scheduler: all ranks save and stop.",
        {"node": "which", "host": "which"},
    ),
    "stopping": Record(
        "The launcher was asked to end: the ranks save after their step.",
        {
            "reason": "what asked: a signal, a request, the time limit",
            "within_seconds": "how long they have; null is without limit",
        },
    ),
    "failure": Record(
        "The agent or the launcher has found why a process ended or hangs.",
        {
            "rank": "which; null where it is about none",
            "node": "which",
            "host": "which",
            "pid": "its process; null where it is not known",
            "cause": "the kind: `trainctl explain device_memory` and its like",
            "exit_code": "it ended with; null for a signal",
            "signal": "that ended it; null for an exit code",
            "message": "in words",
            "hint": "what may help",
            "log": "where it wrote",
            "log_tail": "the last lines of that",
            "launch_exit_code": "how the launch ends for it",
        },
        "By its cause.",
    ),
    "restart": Record(
        "After a failure the launcher starts a new attempt (`launcher.max_restarts`).",
        {
            "number": "of the restart, from 1",
            "of": "how many there may be",
            "step": "that it goes on from",
            "nodes": "it starts on",
            "cause": "what the failure was, in words",
        },
    ),
    "logger": Record(
        "A metrics logger cannot send, or can again. The run does not wait for it.",
        {"name": "which", "problem": "in words; empty when it is over"},
        "`trainctl runs sync RUN` sends what is missing.",
    ),
    "end": Record(
        "The first rank has made its last step.",
        {
            "step": "steps done",
            "reason": "complete, stop_after_steps, stop_requested or no_improvement",
            "best": "of no_improvement: the lowest held-out loss",
            "best_step": "when that was",
            "evaluations_since": "evaluations without a better one",
            "min_delta": "what would have counted as better",
        },
    ),
}
