"""Explanations of the exit codes, with what to do."""

from __future__ import annotations

from trainctl.errors import ExitCode
from trainctl.explanations.causes import Reason

EXIT_CODES = {
    ExitCode.success: Reason(
        "Finished: every rank ended well.",
        "A run that made its last step, was stopped by `trainctl runs stop`, or any other command "
        "that did what was asked.",
        "trainctl launch recipe=tiny",
        "Nothing.",
    ),
    ExitCode.internal_error: Reason(
        "A bug in trainctl: the only case that prints a traceback.",
        "A case that nobody thought of.",
        "error: trainctl failed in an unexpected way: KeyError: 'rank'",
        "Please report it with the traceback and `trainctl --version`.",
    ),
    ExitCode.bad_input: Reason(
        "Bad input: an option, key, value or file; or a technique that cannot be trained with yet.",
        "A typing mistake, or a combination that is not legal. Nothing was started.",
        "error[TC101]: optimizer.lrate: there is no key optimizer.lrate",
        "Each finding names the nearest legal value; `trainctl explain` its rule says more.",
    ),
    ExitCode.does_not_fit: Reason(
        "It does not fit into a device, host memory, NVMe or a disk.",
        "The budget is larger than what the hardware has.",
        "error[TC150]: hardware.device_memory_bytes: does not fit",
        "One of the lines under `what would fit`, or `trainctl plan`; --force starts it all the "
        "same.",
    ),
    ExitCode.environment: Reason(
        "This machine, or a host, lacks something the plan needs.",
        "Devices, packages, a compiler, a port, space, permissions, a host that cannot be reached.",
        "error[TC121]: hardware.devices_per_node: the plan is for 8 devices of a node",
        "What the finding says; `trainctl doctor` looks at everything at once. Not tried again by "
        "launcher.max_restarts.",
    ),
    ExitCode.run_state: Reason(
        "Not a run, in use by another launch, nothing to resume from, or a damaged checkpoint.",
        "A wrong path, a launch that is still alive, or a run that never saved.",
        "error: runs/mine is in use by process 4711 on node1",
        "`trainctl runs ls`, `trainctl runs stop RUN`, `trainctl checkpoint verify RUN`.",
    ),
    ExitCode.training_failed: Reason(
        "A rank ended with an error of its own.",
        "An exception on a rank, a hang, a lost node, or a loss that is not finite.",
        "error: rank 1 ended with exit code 1: RuntimeError: ...",
        "The last lines name the rank, its log and the cause: `trainctl explain` the cause. "
        "`trainctl resume` goes on from the newest checkpoint.",
    ),
    ExitCode.requeue: Reason(
        "Asked to stop, saved and stopped: start the same command again.",
        "A preemption, or the time limit of a job. 75 is EX_TEMPFAIL of sysexits.h.",
        "SIGTERM to node 0: saves after this step and ends, within 120 s",
        "Slurm and Kubernetes repeat the job by themselves; elsewhere `trainctl launch ... "
        "--resume auto` goes on.",
    ),
    ExitCode.interrupted: Reason(
        "Ctrl-C: saved if it could, and ended.",
        "128 + 2, as a shell has it for SIGINT; other signals likewise (137 is SIGKILL).",
        "trainctl resume runs/mine continues from step 2,425: no step is lost",
        "`trainctl resume` goes on.",
    ),
    ExitCode.terminated: Reason(
        "SIGTERM: saved if it could, and ended.",
        "128 + 15: `scancel`, `kill`, a service manager, without a grace to start again after.",
        "trainctl resume runs/mine continues from step 2,425: no step is lost",
        "`trainctl resume`; launcher.stop_grace_seconds makes it exit code 75.",
    ),
}
