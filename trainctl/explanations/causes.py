"""Reasons of `failure` and `intervention` records: why runs fail, and why steps are skipped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """Explanation of one word of a record."""

    meaning: str
    cause: str
    """Common causes, the most frequent first."""
    example: str
    """A line of output or of a log."""
    cure: str


FAILURES = {
    "device_memory": Reason(
        "A device was out of memory.",
        "More activations or logits than planned, another process on the device, or fragments: "
        "the `memory` record after the second step has measured and planned side by side.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "A smaller training.micro_batch_size (the global batch stays, accumulation grows), "
        "kernels.cross_entropy=chunked, activation_checkpointing=full, a higher zero_stage, "
        "offload. `trainctl estimate-memory RUN` shows what takes the space.",
    ),
    "host_memory": Reason(
        "A machine was out of memory, or the kernel killed a process for it.",
        "Offload, pinned buffers, many ranks on a host, or a job that asked for less than it uses.",
        "rank 3 was killed by SIGKILL (out of memory on the host)",
        "More memory for the job, no offload, or fewer ranks on a host.",
    ),
    "communication_timeout": Reason(
        "A collective was not joined by all ranks in time.",
        "A rank that was slow, hung, or cut off the network; the others only waited.",
        "Watchdog caught collective operation timeout",
        "The logs of the other ranks name what they were doing; "
        "launcher.communication_timeout_seconds is the limit.",
    ),
    "lost_peer": Reason(
        "A rank's connection to another one broke.",
        "The other rank ended first; this is a consequence and never the first cause.",
        "Connection reset by peer",
        "Look for the first `failure` record, or at the network where there is none.",
    ),
    "disk_full": Reason(
        "The disk, or a quota on it, has no room.",
        "Checkpoints that are kept, logs, or someone else.",
        "OSError: [Errno 28] No space left on device",
        "Free space (`trainctl checkpoint rm`, checkpoint.keep_last), then `trainctl resume`; "
        "what was saved before is intact.",
    ),
    "data": Reason(
        "Reading the corpus failed on a rank.",
        "A file that changed or went away while the run used it, or a format error far inside it.",
        "could not read the data: ValueError: a.jsonl:4810: not JSON",
        "The traceback in the rank's log names the file.",
    ),
    "code": Reason(
        "An exception that trainctl has no word for.",
        "A script, model or function of yours, or a bug.",
        "rank 0 ended with exit code 1: RuntimeError: shape mismatch",
        "The rank's log has the traceback: `trainctl runs logs RUN`.",
    ),
    "killed": Reason(
        "A signal ended a process.",
        "Someone's kill -9, a scheduler, or a crash in native code (SIGSEGV, SIGABRT, SIGBUS).",
        "rank 1 was killed by SIGKILL",
        "dmesg for memory, /dev/shm for SIGBUS, the log's stack for the others; then `trainctl "
        "resume`.",
    ),
    "hung": Reason(
        "A rank has said nothing for launcher.heartbeat_seconds.",
        "A deadlock, storage that does not answer, or a step that is really that long.",
        "rank 2 has been silent for 600 s",
        "All ranks' stacks are in their logs. For long steps raise launcher.heartbeat_seconds.",
    ),
    "lost_node": Reason(
        "A machine, or the way to it, is gone.",
        "Power, kernel, or network of that machine.",
        "node 1 (node2) was lost: client_loop: send disconnect: Broken pipe",
        "launcher.max_restarts starts again when it is back, with launcher.min_nodes also without "
        "it.",
    ),
    "reported": Reason(
        "trainctl itself said what is wrong on a rank.",
        "Something that could only be seen there: a port, a damaged checkpoint, a loss that is "
        "not finite.",
        "rank 0 ended with exit code 4: port 29500 is taken",
        "What the message says; the same start would end in the same way.",
    ),
}
"""Explanations by the `cause` of a failure."""

INTERVENTIONS = {
    "loss_not_finite": Reason(
        "The loss over the global batch is NaN or infinite.",
        "A learning rate that is too high, too short a warmup, an overflow in 16 bits, or one "
        "sample with nonsense in it.",
        "step 7: loss NaN on rank 1 (samples 96 to 104): skip_batch",
        "Look at the samples (`trainctl data show RUN --samples 96-103`). If they are sound: a "
        "lower optimizer.lr, a longer warmup, precision=bf16, stability.z_loss=1e-4.",
    ),
    "norm_not_finite": Reason(
        "The gradient norm is NaN or infinite where the loss was not.",
        "A division or a root near zero in the backward pass, or an overflow while gradients are "
        "summed.",
        "step 12: gradient norm inf: stop",
        "precision.gradient_accumulation=fp32, a lower optimizer.lr; in a model of yours, the "
        "operation.",
    ),
    "loss_limit": Reason(
        "The loss is above stability.loss_limit.",
        "A limit that you set, from the first step on.",
        "step 3: loss 12.1 above 11: stop",
        "A higher limit, or the causes of a spike.",
    ),
    "norm_limit": Reason(
        "The gradient norm is above stability.norm_limit.",
        "A limit that you set, from the first step on.",
        "step 3: gradient norm 18.2 above 10: skip_batch",
        "A higher limit, or the causes of a spike.",
    ),
    "loss_spike": Reason(
        "The loss is more than stability.spike_factor times its running mean.",
        "An odd batch, a learning rate at the edge, or attention logits that have grown.",
        "step 812: loss 9.31 above 5.2 (samples 12,976 to 12,992): rewind",
        "stability=skip or rewind passes over it by itself. Where spikes come again: a lower "
        "rate, stability.z_loss, Adam's beta2 of 0.95, cleaner text.",
    ),
    "norm_spike": Reason(
        "The gradient norm is more than stability.norm_spike_factor times its running mean.",
        "The same as a spike of the loss, mostly a few steps before it.",
        "step 811: gradient norm 42.0 above 10.5: skip_batch",
        "The same; gradients.adaptive_clipping takes the edge off.",
    ),
}
"""Explanations by the `kind` of an intervention."""

POLICIES = {
    "stop": Reason(
        "The run ends with exit code 6, its weights those of before the step.",
        "stability.on_bad_loss=stop, or too many interventions in a row.",
        "step 7: loss NaN: stop",
        "Find the cause; `trainctl resume RUN stability=skip` goes on over the batch.",
    ),
    "warn": Reason(
        "The update is made all the same; only spikes, what is not finite stops.",
        "stability.on_bad_loss=warn.",
        "step 812: loss 9.31 above 5.2: warn",
        "Watch the curve.",
    ),
    "skip_step": Reason(
        "No update; step and schedule go on, the samples count as seen.",
        "stability.on_bad_loss=skip_step.",
        "step 812: loss 9.31 above 5.2: skip_step",
        "Nothing, if it is rare.",
    ),
    "skip_batch": Reason(
        "No update; the same step is made of the next samples.",
        "stability.on_bad_loss=skip_batch (`stability=skip`).",
        "step 812: loss 9.31 above 5.2: skip_batch",
        "Nothing, if it is rare; `trainctl data show RUN --samples ...` prints what was passed "
        "over.",
    ),
    "rewind": Reason(
        "Back to the newest intact checkpoint, and over all samples since.",
        "stability.on_bad_loss=rewind.",
        "step 812: loss 9.31 above 5.2: rewind to step 800",
        "How far it goes back is checkpoint.every_steps; rewind_lr_factor lowers the rate each "
        "time.",
    ),
}
"""Explanations by the `policy` of an intervention."""
