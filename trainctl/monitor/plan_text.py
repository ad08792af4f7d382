"""Plans and budgets as text: what will run, why, and what takes the memory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainctl.config.codec import flatten
from trainctl.config.keys import as_written
from trainctl.config.quantities import count_text, gib_text
from trainctl.config.schema import (
    BeginDocuments,
    OffloadDevice,
    RunConfig,
    TokenizerFromPath,
    WeightsKind,
)
from trainctl.config.user_code import function_keys
from trainctl.errors import TrainctlError
from trainctl.options.data import SampleKind, spec_of
from trainctl.options.tokenizer import tokenizer_facts
from trainctl.plans.derive import bubble_share
from trainctl.plans.mixture import sources_of
from trainctl.plans.optimizers import group_rate, parameter_groups
from trainctl.plans.shapes import count_parameters
from trainctl.plans.trainable import is_partial, trainable
from trainctl.plans.types import RunPlan
from trainctl.tuning.assess import plain_kernels_cost
from trainctl.tuning.suggest import Suggestion

if TYPE_CHECKING:
    from trainctl.config.schema import DataConfig
    from trainctl.data.mixture import DataPlan

GROUPS_SHOWN = 8
"""Parameter groups that are listed; a learning rate for each block makes very many."""


GROUPS_IN_BRIEF = 2
SOURCES_SHOWN = 3
"""Sources of a mixture that are listed; `trainctl data plan` lists all."""

AXES = ("data", "tensor", "pipeline", "sequence", "context")


def plan_lines(plan: RunPlan, data: DataPlan | None = None, *, brief: bool = False) -> list[str]:
    """Return model, mesh, batch, steps and parameters, then the derived values with their reasons.

    The brief form leaves out the derived values, so that plan and budget fit a screen of 24 lines.
    Settings of DeepSpeed's JSON are left to `trainctl config deepspeed` and `config why`.
    """
    rows = plan_rows(plan, data, most_groups=GROUPS_IN_BRIEF if brief else GROUPS_SHOWN)
    lines = [f"Plan of {plan_name(plan)}", *(f"  {label:<10}{text}" for label, text in rows)]
    settings = {key for key, _ in flatten(plan.deepspeed)}
    derived = [item for item in plan.derived if item.key not in settings]
    if derived and not brief:
        lines.append("  derived")
        lines += [f"    {item.key} = {item.value}: {item.reason}" for item in derived]
    return lines


def plan_name(plan: RunPlan) -> str:
    """Return the name of the plan's recipe, or of its model."""
    return plan.config.recipe or plan.config.model.name


def plan_rows(
    plan: RunPlan, data: DataPlan | None = None, *, most_groups: int = GROUPS_SHOWN
) -> list[tuple[str, str]]:
    """Return model, mesh, batch, steps and parameters, each with its label."""
    config, batch, mesh = plan.config, plan.batch, plan.mesh
    parameters, axes = count_parameters(config.model).total, ", ".join(_axis_sizes(plan))
    steps = f"{plan.total_steps:,} optimizer steps, {plan.warmup_steps:,} of them warmup"
    if plan.stop_step != plan.total_steps:
        steps += f"; this launch ends at step {plan.stop_step:,}"
    tokens = plan.batches.tokens_before(plan.total_steps)
    rows = [
        ("model", f"{config.model.name}, {count_text(parameters)} parameters ({parameters:,})"),
        ("hardware", plan.hardware.name),
        ("mesh", f"{mesh.world_size} processes: {axes}; {_zero_words(config)}{_bubble(plan)}"),
        (
            "batch",
            f"{batch.global_batch_size} sequences = micro {batch.micro_batch_size}"
            f" x accumulation {batch.gradient_accumulation_steps} x data {mesh.data}"
            + (f", from step {plan.ramp[-1].first_step + 1:,}" if plan.ramp else ""),
        ),
        (
            "tokens",
            f"{batch.sequence_length:,} a sequence, {batch.tokens_per_step:,} a step,"
            f" {count_text(tokens)} in all",
        ),
        ("run", steps),
    ]
    cost = plain_kernels_cost(plan)
    if cost:
        rows.append(("kernels", f"{', '.join(_kernel_words(config))} (plain: {cost})"))
    if plan.settings:
        rows.append(("engine", plan.engine))
    rows += [("trains", text) for text in _trainable_line(config)]
    rows += [("data", text) for text in _data_lines(config, data)]
    rows += [("weights", text) for text in _weights_line(config)]
    rows += [("tokenizer", text) for text in _tokenizer_line(config)]
    rows += [("optimizer", line) for line in _group_lines(plan, most_groups)]
    rows += [("runs", program) for program in _user_code_lines(config)]
    return rows


def plan_title(plan: RunPlan) -> str:
    """Return model, hardware and layout of a plan in one line."""
    tokens = f"sequences of {plan.batch.sequence_length:,} tokens"
    return f"{plan_subject(plan)}, {tokens}: {layout_words(plan)}"


def plan_subject(plan: RunPlan) -> str:
    """Return the model with its size, and the hardware."""
    model = plan.config.model
    parameters = count_text(count_parameters(model).total)
    return f"{model.name} ({parameters} parameters) on {plan.hardware.name}"


def layout_words(plan: RunPlan) -> str:
    """Describe ZeRO stage, mesh, offload, batch and recomputation in a few words."""
    config, batch = plan.config, plan.batch
    away = [
        f"{what} on {getattr(config.offload, what).value}"
        for what in ("optimizer", "parameters")
        if getattr(config.offload, what) is not OffloadDevice.none
    ]
    return ", ".join(
        [
            _zero_words(config),
            " x ".join(_axis_sizes(plan)),
            *([f"expert {plan.mesh.expert}"] if plan.mesh.expert > 1 else []),
            *away,
            f"micro batch {batch.micro_batch_size} x {batch.gradient_accumulation_steps}",
            f"recompute {config.activation_checkpointing.mode}",
            *_kernel_words(config),
        ]
    )


def _kernel_words(config: RunConfig) -> Iterator[str]:
    """Yield what fuses the blocks' operations, if anything does, and the loss."""
    kernels = config.kernels
    if kernels.liger:
        yield "liger"
    if kernels.is_compiled:
        yield f"compiled {as_written(kernels.compile)}"
    yield f"cross entropy {as_written(kernels.cross_entropy)}"


def _zero_words(config: RunConfig) -> str:
    """Return the ZeRO stage with the groups within which it shards, or gathers for backward."""
    section = config.zero_stage
    words = f"ZeRO {section.stage}"
    if section.shard_group_size is not None:
        return f"{words} in groups of {section.shard_group_size}"
    return f"{words}, hpZ {section.hpz_partition_size}" if section.hpz_partition_size > 1 else words


def _bubble(plan: RunPlan) -> str:
    """Return the share of time in which pipeline stages are idle; empty without a pipeline."""
    axes = plan.config.parallelism
    if axes.pipeline == 1:
        return ""
    schedule = "DualPipeV, " if axes.is_folded else ""
    return f"; {schedule}bubble {bubble_share(axes, plan.batch.gradient_accumulation_steps):.0%}"


def _axis_sizes(plan: RunPlan) -> list[str]:
    """Return the mesh axes larger than 1, and the data axis, with their sizes."""
    sizes = {axis: getattr(plan.mesh, axis) for axis in AXES}
    return [f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data"]


def _trainable_line(config: RunConfig) -> Iterator[str]:
    """Yield the number of trainable parameters, if some are frozen."""
    if not config.trains_itself or not is_partial(config):
        return
    found = trainable(config)
    trained, frozen = found.trained_elements, found.frozen_elements
    yield (
        f"{count_text(trained)} parameters ({trained:,}), "
        f"{100 * trained / (trained + frozen):.2g} % of all; {count_text(frozen)} are frozen"
    )


def _data_lines(config: RunConfig, data: DataPlan | None) -> Iterator[str]:
    """Yield the training text, its tokens and its epochs, as far as they are known."""
    if not config.trains_itself:
        return
    if config.data.factory is not None:
        begin = _begin_text(config)
        yield f"texts of {config.data.factory}, counted when the run starts{begin}"
        return
    names = list(sources_of(config.data))
    what = f"{len(names)} sources" if config.data.sources else _data_place(config.data)
    if data is None:
        yield f"{what}, counted when the run starts{_begin_text(config)}"
        return
    about = "about " if any(count.is_estimate for count in data.counts.values()) else ""
    tokens = count_text(sum(count.tokens for count in data.counts.values()))
    epochs = [_epochs_text(data.run[name].epochs) for name in names]
    if config.data.sources:
        epochs = [f"{name} {each}" for name, each in zip(names, epochs, strict=True)]
        more = [f"{len(names) - SOURCES_SHOWN} more"] if len(names) > SOURCES_SHOWN else []
        epochs = [", ".join([*epochs[:SOURCES_SHOWN], *more])]
    yield f"{what}: {about}{tokens} tokens to train on, epochs: {epochs[0]}{_begin_text(config)}"


def _begin_text(config: RunConfig) -> str:
    """Return what texts begin with; empty if the tokenizer puts nothing before a text."""
    sections = [each for each in sources_of(config.data).values() if spec_of(each).begins_texts]
    try:
        tokens = tokenizer_facts(config.tokenizer).begin_tokens if sections else ()
    except TrainctlError:  # reported by the check of the files
        return ""
    if not tokens:
        return ""
    begins = {each.begin_documents is BeginDocuments.tokenizer for each in sections}
    verb = "begin" if begins == {True} else "do not begin" if begins == {False} else "partly begin"
    are_texts = all(spec_of(each).gives is SampleKind.text for each in sections)
    what = "documents" if are_texts else "texts"
    return f"; {what} {verb} with {''.join(tokens)} (data.begin_documents)"


def _data_place(section: DataConfig) -> str:
    """Return the kind of a data section and the first path or URL that it names."""
    paths = getattr(section, "paths", None) or [getattr(section, "url", None)]
    more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return f"{section.kind} {paths[0]}{more}" if paths[0] else section.kind


def _epochs_text(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"


def _weights_line(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not config.trains_itself:
        return
    if model.initial_weights is None:
        yield f"random at step 0, by training.seed={config.training.seed}"
    elif model.initial_weights == model.path and model.weights is not WeightsKind.pretrained:
        yield f"of {model.path} at step 0; model.weights=random draws them from the seed instead"
    else:
        yield f"of {model.initial_weights} at step 0"


def _tokenizer_line(config: RunConfig) -> Iterator[str]:
    """Yield the vocabulary and end-of-document token; nothing if the tokenizer cannot be read."""
    tokenizer = config.tokenizer
    if not config.trains_itself:
        return
    try:
        facts = tokenizer_facts(tokenizer)
    except TrainctlError:  # reported by the check of the files
        return
    path = tokenizer.path if isinstance(tokenizer, TokenizerFromPath) else None
    yield f"{path or tokenizer.kind}: {facts.describe(config.model.vocab_size)}"


def _group_lines(plan: RunPlan, most: int) -> Iterator[str]:
    config = plan.config
    if not config.trains_itself:
        return
    groups = parameter_groups(config)
    for group in groups[:most]:
        peak = group_rate(group, config, plan.lr_scale)
        yield (
            f"{group.name}: {len(group.parameters)} tensors,"
            f" {count_text(group.elements)} parameters, peak lr {peak:g},"
            f" decay {group.weight_decay:g}"
        )
    if len(groups) > most:
        yield f"and {len(groups) - most} groups more"


def _user_code_lines(config: RunConfig) -> Iterator[str]:
    """Yield the user's own script and functions, in the form in which they are called."""
    if config.script is not None:
        yield shlex.join([config.script, *config.script_arguments])
    for key, reference in function_keys(config):
        yield f"{reference} ({key})"


def suggestion_text(suggestion: Suggestion) -> str:
    """Format a suggestion with its memory and its cost in speed."""
    change = suggestion.speed - 1
    speed = "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} "
    if speed != "as fast":
        speed += "faster" if change > 0 else "slower"
    saved = suggestion.saved_bytes
    memory = f"{gib_text(abs(saved))} {'less' if saved >= 0 else 'more'}"
    peak = gib_text(suggestion.peak_bytes)
    return f"{' '.join(suggestion.overrides)}  (peak {peak}, {memory}; {speed})"


LABEL_WIDTH = 26
BAR_WIDTH = 40
LINE_WIDTH = 76
"""Width of the components' line in the brief view, in characters."""
PARTIAL_BLOCKS = " ▏▎▍▌▋▊▉"
"""Characters that fill one to seven eighths of a cell."""


def brief_lines(budget: Mapping[str, Any]) -> list[str]:
    """Return a line each for the peak, its components, host memory, NVMe and disk."""
    number = _number_format(budget["device_peak_bytes"])
    result, between = _capacity_verdict(budget, number)
    peak = f"{number(budget['device_peak_bytes'])}{result} ({between})"
    lines = [f"Memory of a device, GiB: {peak}", f"  {_largest_parts(budget, number)}"]
    for name, size in (
        ("Host memory of a node", budget["host"]["bytes_per_node"]),
        ("NVMe of a node", budget["nvme_bytes_per_node"]),
    ):
        lines += [f"{name}: {_number_format(size)(size)} GiB"] if size else []
    return [*lines, _disk_line(budget)]


def _largest_parts(budget: Mapping[str, Any], number: Any) -> str:
    """List the peak's largest components that fit one line, and the sum of the others."""
    sizes = sorted(((size, name) for name, size in budget["components"].items()), reverse=True)
    line = ""
    for count in range(1, len(sizes) + 1):
        rest = sum(size for size, _ in sizes[count:])
        parts = [f"{name} {number(size)}" for size, name in sizes[:count] if size]
        longer = ", ".join(parts + ([f"other {number(rest)}"] if rest else []))
        if line and len(longer) > LINE_WIDTH:
            break
        line = longer
    return line


def budget_lines(
    budget: Mapping[str, Any], host_capacity_bytes: int | None, *, unicode_bars: bool = True
) -> list[str]:
    """Return the table's lines: components of the worst pipeline stage at its peak, then the rest.

    Bars share one scale, in which the full width is the device's capacity or, when the peak does
    not fit, the peak.
    """
    capacity, peak = budget["device_capacity_bytes"], budget["device_peak_bytes"]
    number = _number_format(peak)
    scale = max(capacity, peak, 1)
    title = "Memory of a device, GiB"
    worst = max(budget["stages"], key=lambda stage: stage["peak_bytes"], default=None)
    if worst and len(budget["stages"]) > 1:
        title += (
            f" (pipeline stage {worst['pipeline_stage']} of {len(budget['stages'])}, the worst)"
        )
    lines = [title]
    for name, size in budget["components"].items():
        if size:
            bar = _share_bar(size / scale, unicode_bars)
            lines.append(f"  {name:<{LABEL_WIDTH}}{number(size):>10}  {bar}".rstrip())
    lines.append(_peak_line(budget, number))
    phases = ", ".join(f"{name} {number(size)}" for name, size in budget["phases"].items())
    lines.append(f"  {'by phase':<{LABEL_WIDTH}}{phases}")
    if budget["device_reserved_bytes"]:
        lines.append(
            _row_text("reserved by the allocator", number(budget["device_reserved_bytes"]))
        )
    lines += _host_lines(budget["host"], host_capacity_bytes)
    if budget["nvme_bytes_per_node"]:
        nvme = budget["nvme_bytes_per_node"]
        lines.append(f"NVMe of a node: {_number_format(nvme)(nvme)} GiB")
    lines.append(_disk_line(budget))
    if budget["weights_only_bytes"]:
        one, kept = budget["weights_only_bytes"], budget["weights_only_kept_bytes"]
        number = _number_format(one)
        lines.append(f"Weights alone on disk: {number(one)} GiB each, {number(kept)} GiB kept")
    return lines + [f"note: {note}" for note in budget["notes"]]


def _disk_line(budget: Mapping[str, Any]) -> str:
    one, kept = budget["checkpoint_bytes"], budget["checkpoints_kept_bytes"]
    number = _number_format(one)
    return f"Checkpoints on disk: {number(one)} GiB each, {number(kept)} GiB kept"


def _capacity_verdict(budget: Mapping[str, Any], number: Any) -> tuple[str, str]:
    """Return the capacity with the verdict, and the bounds of the peak, as text."""
    verdict = {True: "fits", False: "does not fit", None: "too close to tell"}[budget["fits"]]
    low, high = budget["device_peak_low_bytes"], budget["device_peak_high_bytes"]
    capacity = budget["device_capacity_bytes"]
    result = f" of {number(capacity)}: {verdict}" if capacity else ", capacity unknown"
    return result, f"between {number(low)} and {number(high)}"


def _peak_line(budget: Mapping[str, Any], number: Any) -> str:
    result, between = _capacity_verdict(budget, number)
    value = number(budget["device_peak_bytes"])
    return _row_text(f"peak, at {budget['peak_phase']}", f"{value}{result} ({between})", value)


def _host_lines(host: Mapping[str, Any], capacity: int | None) -> list[str]:
    size = host["bytes_per_node"]
    if not size:
        return []
    number = _number_format(size)
    of = f" of {number(capacity)}" if capacity else ""
    parts = ", ".join(f"{name} {number(part)}" for name, part in host["components"].items() if part)
    return [f"Host memory of a node: {number(size)}{of} GiB ({parts})"]


def _row_text(label: str, text: str, aligned: str = "") -> str:
    """Return a row in which `aligned`, by default all of `text`, ends in the column of numbers."""
    indent = 10 - len(aligned or text)
    return f"  {label:<{LABEL_WIDTH}}{' ' * max(indent, 0)}{text}"


def _number_format(largest: float) -> Any:
    digits = 2 if largest >= 2**30 else 4
    return lambda size: f"{size / 2**30:,.{digits}f}"


def _share_bar(share: float, unicode_bars: bool) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    if not unicode_bars:
        return "#" * round(share * BAR_WIDTH)
    return "█" * (eighths // 8) + PARTIAL_BLOCKS[eighths % 8].strip()
