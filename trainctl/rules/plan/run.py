"""Rules about checkpoints, logging, the launcher, how bad steps are handled, and the executor that
prepares a corpus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainctl.config.schema import AdaptiveClipping, DataExecutor, OnBadLoss, RunConfig
from trainctl.config.suggest import words
from trainctl.options import launcher as launchers
from trainctl.options.data import spec_of as source_of
from trainctl.options.launcher.slurm import is_one_of
from trainctl.options.optimizer import spec_of
from trainctl.plans.mixture import sources_of
from trainctl.plans.settings import EMA_METRIC, average_conflict, gradient_conflict
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule, warning_problem

METRICS = ("loss", EMA_METRIC)
"""Metrics that an evaluation measures."""

MIRROR_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file")
"""Protocols of fsspec whose `pipe_file(mode="create")` is one conditional request, and `file`."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""Log levels that DeepSpeed accepts (utils/logging.py)."""


@rule("TC075", "checkpoint.best_of", example="recipe=tiny checkpoint.best_of=accuracy")
def best_is_measured(draft: Draft) -> Iterator[Problem]:
    """The best checkpoint is chosen by a metric that the evaluation measures.

    The best checkpoint is the one with the lowest value of a metric of the evaluation, which has to
    be measured.

    Fix: Set checkpoint.best_of=loss, with training.evaluate_every_steps.
    """
    best_of = draft.config.checkpoint.best_of
    if best_of == EMA_METRIC and draft.config.training.ema_decay is None:
        yield Problem(
            f"checkpoint.best_of={best_of} is of the average of the weights, and none is kept",
            "training.ema_decay=0.999",
        )
    elif best_of is not None and best_of not in METRICS:
        yield Problem(
            f"checkpoint.best_of={best_of} is no metric of an evaluation",
            f"checkpoint.best_of={METRICS[0]}",
        )


@rule(
    "TC028",
    "training.ema_decay",
    example="recipe=tiny zero_stage=3 training.ema_decay=0.99 offload.optimizer=nvme "
    "offload.nvme_path=/local_nvme",
)
def average_can_be_kept(draft: Draft) -> Iterator[Problem]:
    """A moving average of the weights has fp32 master weights that it can be swapped with.

    The moving average is one more copy beside the fp32 master weights, on the device or in host
    memory; evaluation swaps the two. DeepSpeed's swapper to NVMe knows Adam's tensors only.

    Fix: Use offload=cpu in place of NVMe, or training.ema_decay=null.
    """
    config = draft.config
    hindrance = average_conflict(config) if config.trains_itself else None
    if config.training.ema_decay is None or hindrance is None:
        return
    setting, why = hindrance
    yield Problem(
        f"training.ema_decay={config.training.ema_decay:g} with {setting}: {why}",
        f"leave {setting.partition('=')[0]} out, or training.ema_decay=null",
    )


@rule(
    "TC040",
    "checkpoint.weights_only_every_steps",
    severity=WARNING,
    example="recipe=tiny checkpoint.weights_only_every_steps=200",
)
def weights_are_saved_before_the_end(draft: Draft) -> Iterator[Problem]:
    """The interval of weights-only saves is not longer than the run.

    Weights were to be saved beside the checkpoints, and the run ends before the first time.

    Fix: Use a shorter interval, or leave it out.
    """
    every, steps = draft.config.checkpoint.weights_only_every_steps, draft.total_steps
    if every is not None and steps is not None and every > steps:
        yield Problem(
            f"checkpoint.weights_only_every_steps={every} saves nothing in {steps} steps",
            f"checkpoint.weights_only_every_steps={steps}",
        )


@rule(
    "TC076",
    "checkpoint.at_end",
    severity=WARNING,
    example="recipe=tiny checkpoint.at_end=false checkpoint.every_steps=null",
)
def something_is_saved(draft: Draft) -> Iterator[Problem]:
    """A run saves a checkpoint that it can be resumed from.

    A run that saves nothing can only be started again from step 0, and leaves no model.

    Fix: Set checkpoint.every_steps, every_minutes or at_end.
    """
    settings = draft.config.checkpoint
    if not settings.saves_something:
        lost = settings.weights_only_every_steps is None
        yield Problem(
            "no checkpoint is ever saved: the run cannot be resumed, and its model is lost"
            if lost
            else "only weights are saved: the run cannot be resumed",
            "checkpoint.every_steps=100, checkpoint.every_minutes=30 or checkpoint.at_end=true",
        )


@rule("TC176", "checkpoint.mirror", example="recipe=tiny checkpoint.mirror=http://host/run")
def mirror_has_conditional_writes(draft: Draft) -> Iterator[Problem]:
    """checkpoint.mirror is a folder of a store that can refuse to replace an object.

    What is listed in a mirror is written with the condition that nothing was listed meanwhile, so
    that two runs, or two copies of one, cannot overwrite each other. S3, Google Cloud Storage and
    Azure have such writes, and a local or shared file system has links. `memory://` ends with its
    process.

    Fix: Use s3://BUCKET/FOLDER, gs://, az:// or file:///FOLDER, with a folder for this run alone.
    """
    url = draft.config.checkpoint.mirror
    if url is None:
        return
    protocol, mark, place = url.partition("://")
    if not mark or protocol not in MIRROR_PROTOCOLS:
        why = f"{protocol}://" if mark else "a path"
        yield Problem(
            f"checkpoint.mirror={url}: {why} is none of {', '.join(MIRROR_PROTOCOLS)}, whose "
            "writes can have a condition",
            "checkpoint.mirror=" + ("s3://BUCKET/FOLDER" if mark else f"file://{url}"),
        )
    elif protocol == "file" and not place.startswith("/"):
        yield Problem(
            f"checkpoint.mirror={url} is no absolute path", f"checkpoint.mirror=file:///{place}"
        )
    elif protocol != "file" and not place.rstrip("/").partition("/")[2]:
        yield Problem(
            f"checkpoint.mirror={url} is a whole bucket, and a mirror is a folder of one run",
            f"checkpoint.mirror={protocol}://{place.rstrip('/') or 'BUCKET'}/runs/NAME",
        )


@rule(
    "TC089",
    "launcher.*",
    example="recipe=tiny launcher=ssh \"launcher.hosts=['-oProxyCommand=id']\"",
)
def launcher_names_are_valid(draft: Draft) -> Iterator[Problem]:
    """Names that a launcher passes to other programs cannot be read as options or commands.

    A host, an interface or a partition is handed to ssh, srun or mpirun. A name that begins with a
    dash, or holds what a shell reads, would be an option or a command there.

    Fix: Use letters, digits, dots and dashes.
    """
    section = draft.config.launcher
    spec = launchers.spec_of(section)
    if spec.bad_names is not None:
        for key, message, hint in spec.bad_names(section):
            yield Problem(message, hint, key)


@rule("TC078", "logging.deepspeed_level", example="recipe=tiny logging.deepspeed_level=loud")
def log_level_is_known(draft: Draft) -> Iterator[Problem]:
    """logging.deepspeed_level is a log level.

    DeepSpeed looks the level up by name and fails at the start for one that it does not know.

    Fix: Choose debug, info, warning, error or critical.
    """
    level = draft.config.logging.deepspeed_level
    if level not in LOG_LEVELS:
        yield Problem(
            f"logging.deepspeed_level={level} is not a log level", f"one of {', '.join(LOG_LEVELS)}"
        )


@rule(
    "TC080",
    "logging.profile_steps",
    "logging.profile_ranks",
    example="recipe=tiny logging.profile_steps=[3]",
)
def profiler_has_a_window(draft: Draft) -> Iterator[Problem]:
    """The profiler records steps of the run, on ranks that exist.

    The profiler records a window of steps on named ranks; one outside the run writes nothing.

    Fix: Set logging.profile_steps=[FIRST,LAST], counted from 1, late enough that the first steps
    are over.
    """
    steps, ranks = draft.config.logging.profile_steps, draft.config.logging.profile_ranks
    if not steps:
        return
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        first = max(1, min(steps))
        yield Problem(
            f"logging.profile_steps={steps} is not a first and a last step, counted from 1",
            f"logging.profile_steps=[{first},{max(first, *steps)}]",
        )
    elif draft.total_steps is not None and steps[0] > draft.total_steps:
        yield warning_problem(
            f"logging.profile_steps={steps} lies behind the run's last step, {draft.total_steps}: "
            "nothing will be recorded",
            f"logging.profile_steps=[{draft.total_steps},{draft.total_steps}]",
        )
    world_size = draft.mesh.world_size if draft.mesh else None
    if not ranks or min(ranks) < 0 or (world_size is not None and max(ranks) >= world_size):
        yield Problem(
            f"logging.profile_ranks={ranks} names no rank, or one that is not there"
            + (f": the plan has {world_size}, from 0" if world_size else ""),
            "logging.profile_ranks=[0]",
            key="logging.profile_ranks",
        )


@rule(
    "TC079",
    "optimizer.kind",
    severity=WARNING,
    example="recipe=tiny optimizer=adafactor script=train.py",
    files={"train.py": ""},
)
def factored_states_stay_factored(draft: Draft) -> Iterator[Problem]:
    """Factored optimizer states are used without ZeRO.

    Adafactor saves memory by keeping row and column sums of matrices. ZeRO 1 to 3 hands a script's
    optimizer flat vectors, which have no rows.

    Fix: Use zero_stage=0, or optimizer=adamw_8bit.
    """
    config = draft.config
    if config.trains_itself:
        return  # trainctl's adafactor knows the matrix of each flat piece
    if spec_of(config.optimizer).has_factored_states and config.zero_stage.stage > 0:
        yield Problem(
            f"optimizer.kind={config.optimizer.kind} at ZeRO stage {config.zero_stage.stage} "
            "updates flat partitions: its second moment is whole, and saves no memory",
            "zero_stage=0, or optimizer=adamw_8bit",
        )


@rule(
    "TC069",
    "gradients.*",
    "stability.*",
    "optimizer.groups",
    example="recipe=tiny kernels.compile=deepcompile gradients.clip_value=1.0",
)
def gradients_are_seen(draft: Draft) -> Iterator[Problem]:
    """Gradients are visible to the trainer where a setting processes them.

    To clip by value, add noise, judge a norm or drop a step, the trainer needs the gradient before
    its update. DeepCompile, SuperOffload and ZenFlow reduce and apply it inside.

    Fix: Keep the technique or the speed-up, not both.
    """
    config = draft.config
    if not config.trains_itself:
        return
    hidden = gradient_conflict(config)
    if hidden is None:
        return
    setting, why = hidden
    for key, value in _needs_gradients(config):
        left_out = setting.partition("=")[0]
        yield Problem(f"{key}={value} with {setting}: {why}", f"leave {left_out} out", key=key)


@rule(
    "TC093",
    "stability.on_bad_loss",
    example="recipe=tiny stability.on_bad_loss=rewind checkpoint.every_steps=null",
)
def rewinding_has_a_checkpoint(draft: Draft) -> Iterator[Problem]:
    """stability.on_bad_loss=rewind has checkpoints during the run.

    A rewind goes back to the newest checkpoint. Without one on the way there is nothing to go back
    to, and the first spike would stop the run.

    Fix: Set checkpoint.every_steps or every_minutes; a rewind costs as much as lies between
    checkpoints.
    """
    config = draft.config
    every = (config.checkpoint.every_steps, config.checkpoint.every_minutes)
    if config.stability.on_bad_loss is OnBadLoss.rewind and every == (None, None):
        yield Problem(
            "stability.on_bad_loss=rewind, but no checkpoint is saved before the end",
            "checkpoint.every_steps=100",
        )


def _needs_gradients(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the keys, with their values, of features that need the gradients."""
    gradients, stability = config.gradients, config.stability
    if gradients.clip_value > 0:
        yield "gradients.clip_value", gradients.clip_value
    if gradients.adaptive_clipping is not AdaptiveClipping.none:
        yield "gradients.adaptive_clipping", gradients.adaptive_clipping.value
    if gradients.centralize:
        yield "gradients.centralize", "true"
    if gradients.noise > 0:
        yield "gradients.noise", gradients.noise
    if any(entry.gradient_clipping for entry in config.optimizer.groups):
        yield "optimizer.groups", "[...] with gradient_clipping"
    if stability.on_bad_loss not in (OnBadLoss.stop, OnBadLoss.warn):
        yield "stability.on_bad_loss", stability.on_bad_loss.value
    if stability.norm_spike_factor is not None:
        yield "stability.norm_spike_factor", stability.norm_spike_factor
    if stability.norm_limit is not None:
        yield "stability.norm_limit", stability.norm_limit


_OWN_OPTIONS = words("array clusters job-name nodes ntasks open-mode output parsable wait wrap")
"""Options of sbatch by which an array job's results are found."""


@rule(
    "TC500",
    "data.executor_address",
    example="recipe=tiny data.executor=ray data.executor_address=head",
)
def ray_cluster_has_an_address(draft: Draft) -> Iterator[Problem]:
    """data.executor_address is an address that Ray can connect to.

    auto is the cluster that this machine is a node of, HOST:PORT the head node of one that this
    machine joins as a driver, and ray://HOST:PORT the server for clients outside the cluster.

    Fix: Use the address that ray start has printed, usually HOST:6379 or ray://HOST:10001.
    """
    address = draft.config.data.executor_address
    found = re.fullmatch(r"(ray://)?[^\s/:]+:(\d{1,5})", address)
    if address != "auto" and not (found and 0 < int(found[2]) < 1 << 16):
        host = re.sub(r"^.*//|[:/].*$", "", address) or "HOST"
        yield Problem(
            f"data.executor_address={address} is no address of a Ray cluster",
            f"nearest legal: auto, {host}:6379 or ray://{host}:10001",
        )


@rule(
    "TC501",
    "data.executor_options",
    example="recipe=tiny data.executor=slurm 'data.executor_options=[-p cpu]'",
)
def array_jobs_have_legal_options(draft: Draft) -> Iterator[Problem]:
    """data.executor_options are long options of sbatch, and none that the array job needs.

    Each entry is one option as --name or --name=VALUE. The job's name, number of tasks, nodes and
    output are set by trainctl, which finds the job and the results by them.

    Fix: Write --partition=cpu for -p cpu; set the number of tasks with --workers.
    """
    for option in draft.config.data.executor_options:
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f]+)?", option)
        if found is None:
            yield Problem(
                f"{option!r} in data.executor_options is no option of the form --name=VALUE",
                "data.executor_options=['--partition=cpu']",
            )
        elif is_one_of(option, _OWN_OPTIONS):
            yield Problem(
                f"{option!r} in data.executor_options is set by trainctl",
                "leave it out; data prepare --workers N makes an array of N tasks",
            )


@rule("TC502", "data.executor", example="recipe=tiny data.executor=ray data.factory=mine:texts")
def executor_has_tasks(draft: Draft) -> Iterator[Problem]:
    """data.executor has text to prepare in tasks.

    A function's texts, and text that data.max_bytes cuts, are read by one process. Token files and
    prepared corpora need no preparation.

    Fix: Set data.executor=local.
    """
    data = draft.config.data
    if data.executor is DataExecutor.local:
        return
    sections = sources_of(data).values()
    why, hint = "", "data.executor=local"
    if data.factory is not None:
        why = "data.factory gives its texts in one process"
    elif all(source_of(each).is_tokenized or source_of(each).is_prepared for each in sections):
        why = "the tokens are there"
    elif all(each.max_bytes is not None for each in sections):
        why = "text that data.max_bytes cuts is read by one process"
        hint += ", or leave data.max_bytes out"
    if why:
        yield Problem(f"data.executor={data.executor.value} has nothing to do: {why}", hint)
