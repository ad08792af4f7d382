"""Composition of a checked `RunConfig` from a recipe, options and overrides.

Hydra decides which files take part and in which order (`trainctl.config.defaults_list`). This
module reads them with the line of each key, checks them, and layers them, so that the origin shown
for a value is the place that set it. The values equal Hydra's own composition with one exception:
an option chosen on the command line replaces its whole section, including what the recipe set
there. `tests/config/test_hydra.py` verifies both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from trainctl.config.catalog import (
    BASE,
    Folder,
    chosen_options,
    find_config_file,
    ignored_yml_files,
    search_folders,
    shadowing_warning,
)
from trainctl.config.check import UNKNOWN_KEY, Setting, check_setting, wrong_value
from trainctl.config.codec import from_plain, to_plain, value_at
from trainctl.config.extends import AppliedFile, check_extends, overridden_keys
from trainctl.config.keys import as_override, leaves_under, range_problem
from trainctl.config.layers import DEFAULT_SOURCE, Layer, Stack
from trainctl.config.literal_secrets import literal_secrets
from trainctl.config.model_directory import (
    DIRECTORY_FIELDS,
    OVERRIDABLE_FIELDS,
    fill_from_directory,
)
from trainctl.config.overrides import Choice, Overrides, read_overrides
from trainctl.config.registry import load_spec
from trainctl.config.schema import GROUPS, LIST_GROUPS, ModelConfig, RunConfig, TokenizerFromPath
from trainctl.config.secrets import redact_setting
from trainctl.config.sections import complete_named_sections, drop_foreign_keys
from trainctl.config.yaml_files import read_document
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.models.anatomy import expert_counts
from trainctl.models.directory import NO_MODEL
from trainctl.models.tracing import anatomy_in_child

CONFLICT_FREE_FIELDS = ("name", "family", "path", "initial_weights")
"""Fields of `model` that cannot conflict with the directory: it is read with their values, or it
keeps them.
"""

SAVED = "config.yaml of the run"
NO_EFFECT, NOT_THE_DIRECTORYS, DROPPED = "TC112", "TC146", "TC420"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedConfig:
    """A configuration, with the origin of each value."""

    config: RunConfig
    layers: Mapping[str, tuple[Layer, ...]]
    """Every place that set a key, by key, in the order of application: the last one won. Keys of
    free-form mappings have layers of their own.
    """
    findings: tuple[Finding, ...]
    """Warnings; results of `compose_leniently` also hold errors."""
    overrides: tuple[str, ...]
    """The overrides, as typed."""

    @property
    def has_error(self) -> bool:
        """Whether a finding is an error: `config` then lacks the values that are wrong."""
        return _has_error(self.findings)

    def source_of(self, key: str) -> str:
        """Return the place that set a key, or the last key inside it; empty for a default."""
        if key in self.layers:
            return self.layers[key][-1].source
        inside = [layers for name, layers in self.layers.items() if name.startswith(f"{key}.")]
        return inside[-1][-1].source if inside else ""


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> ComposedConfig:
    """Compose a recipe, or the base configuration, with overrides.

    Args:
        overrides: `recipe=NAME`, `GROUP=OPTION`, `KEY=VALUE`, in Hydra's grammar.
        config_dir: A folder of the user's with `conf/` and `recipes/`, searched first.

    Raises:
        TrainctlError: With all problems found in the overrides and in the files in use.
    """
    composed = compose_leniently(overrides, config_dir=config_dir)
    if composed.has_error:
        raise TrainctlError.from_findings(composed.findings)
    return composed


def compose_leniently(
    overrides: Sequence[str], *, config_dir: Path | None = None
) -> ComposedConfig:
    """Compose as `compose` does, but leave out wrong values, to find all problems at once.

    Raises:
        TrainctlError: The recipe or a file in use cannot be read, so nothing is left to check.
    """
    folders = search_folders(config_dir)
    asked = read_overrides(overrides, folders)
    findings = [*asked.findings, *ignored_yml_files(folders)]
    recipe = str(asked.recipe.option) if asked.recipe else BASE
    stack = Stack(to_plain(RunConfig()))
    broken = check_extends(folders, recipe, _chosen_options(asked))
    if _has_error(broken) or any(item.key == "recipe" for item in asked.findings):
        raise TrainctlError.from_findings([*findings, *broken])
    defaults = [recipe, *({f"override /{g}": c.option} for g, c in asked.choices.items())]
    chosen = chosen_options(folders, recipe)
    new = {g: c for g, c in asked.choices.items() if chosen.get(g) != c.option}
    findings += broken
    replaced = _apply_files(stack, folders, defaults, new, findings)
    if asked.recipe:
        stack.apply([Setting(("recipe",), recipe, asked.recipe.source)])
    composed = _finish_composition(
        stack, asked, findings, overrides, fill_model=True, recipe=recipe
    )
    dropped = _warn_of_replaced_values(composed.config, replaced, asked)
    return replace(composed, findings=(*composed.findings, *dropped))


def recompose(
    saved: RunConfig,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    source: str = SAVED,
) -> ComposedConfig:
    """Change a saved configuration by overrides, as a resume does.

    An option chosen for a group replaces its section. The recipe cannot be chosen again.

    Args:
        config_dir: A folder of the user's with `conf/` and `recipes/`, searched first.
        source: Name of the saved configuration in messages.

    Raises:
        TrainctlError: With all problems found.
    """
    stack = Stack(to_plain(saved), source)
    folders = search_folders(config_dir) if overrides else []
    asked = read_overrides(overrides, folders)
    findings = list(asked.findings)
    if asked.recipe:
        findings.append(
            Finding(
                rule=NO_EFFECT,
                key="recipe",
                message=f"a run keeps its recipe ({saved.recipe or 'none'})",
                hint=f"change groups and keys ({', '.join(GROUPS[:3])}, ...), or launch a new run",
                source=asked.recipe.source,
            )
        )
    findings += check_extends(folders, "", _chosen_options(asked))
    if asked.choices and not _has_error(findings):
        defaults = [{group: choice.option} for group, choice in asked.choices.items()]
        _apply_files(stack, folders, defaults, asked.choices, findings)
    named_model = "model" in asked.choices or any(s.key == "model.path" for s in asked.settings)
    composed = _finish_composition(
        stack, asked, findings, overrides, fill_model=named_model, recipe=None
    )
    if composed.has_error:
        raise TrainctlError.from_findings(composed.findings)
    return composed


def _finish_composition(
    stack: Stack,
    asked: Overrides,
    findings: list[Finding],
    overrides: Sequence[str],
    *,
    fill_model: bool,
    recipe: str | None,
) -> ComposedConfig:
    """Apply the keys set on the command line, resolve references, read the model's directory."""
    unchosen = dict(_keys_of_unchosen_options(stack, asked.settings))
    findings += unchosen.values()
    findings += stack.apply_level([each for each in asked.settings if each.key not in unchosen])
    unresolved = stack.resolve()
    findings += unresolved
    if unresolved:  # their values are not known, so nothing can be checked
        raise TrainctlError.from_findings(findings)
    typed = {setting.key for setting in asked.settings}
    findings += [*drop_foreign_keys(stack, typed, recipe), *complete_named_sections(stack)]
    _fill_head(stack)
    if fill_model:
        findings += _fill_model(stack, typed)
    config = from_plain(RunConfig, stack.plain)
    findings += _out_of_range(stack)
    findings += [
        finding.set_by(_last_source(stack, finding.key)) for finding in literal_secrets(config)
    ]
    findings = list(dict.fromkeys(findings))  # a file that two others extend is read twice
    return ComposedConfig(
        config=config,
        layers={key: tuple(layers) for key, layers in stack.layers.items()},
        findings=tuple(findings),
        overrides=tuple(overrides),
    )


def _out_of_range(stack: Stack) -> Iterator[Finding]:
    for key, leaf in leaves_under(stack.plain).items():
        with suppress(KeyError):  # a value that was not accepted
            problem = range_problem(leaf.metadata, value_at(stack.plain, key))
            if problem and key in stack.layers:
                yield wrong_value(key, _last_source(stack, key), problem)


def _keys_of_unchosen_options(
    stack: Stack, settings: Sequence[Setting]
) -> Iterator[tuple[str, Finding]]:
    """Yield keys such as `callbacks.NAME.KEY`, typed for an option that is not chosen, each with an
    error: a key alone would add the option without the values of its file.
    """
    for setting in settings:
        group, *rest = setting.path
        is_key = setting.source.lstrip("+").startswith(f"{group}.")  # not `callbacks={NAME: …}`
        if group in LIST_GROUPS and is_key and rest[0] not in stack.plain[group]:
            names = ",".join((*stack.plain[group], rest[0]))
            yield (
                setting.key,
                Finding(
                    rule=UNKNOWN_KEY,
                    message=f"{setting.key} is a key of {rest[0]}, which `{group}` does not choose",
                    hint=f"{group}=[{names}]",
                    key=setting.key,
                    source=setting.source,
                ),
            )


def _has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.is_error for finding in findings)


def _chosen_options(asked: Overrides) -> dict[str, str | list[str]]:
    return {group: choice.option for group, choice in asked.choices.items()}


def _apply_files(
    stack: Stack,
    folders: list[Folder],
    defaults: Sequence[Any],
    choices: Mapping[str, Choice],
    findings: list[Finding],
) -> dict[str, Layer]:
    """Apply the files to the stack in Hydra's order, chosen options last.

    Args:
        findings: Findings so far, to which those on the files are appended.

    Returns:
        By key, each value that a chosen option replaced.

    Raises:
        TrainctlError: The files have no order, so that no value is known.
    """
    from trainctl.config.defaults_list import files_in_order

    files = files_in_order(folders, defaults)
    if isinstance(files, Finding):
        raise TrainctlError.from_findings([*findings, files])
    applied: list[AppliedFile] = []
    replaced: dict[str, Layer] = {}
    chosen: dict[str, list[Setting]] = {group: [] for group in choices}
    for config_path, package in files:
        found = find_config_file(folders, config_path)
        assert found is not None, config_path
        folder, path = found
        document = read_document(path, folder.name_of(path))
        findings += document.findings
        hides = None if folder.is_shipped else shadowing_warning(folders, config_path)
        findings += [hides] if hides else []
        prefix, level = tuple(package.split(".")) if package else (), list[Setting]()
        if package in LIST_GROUPS:
            prefix = (package, path.stem)
            level.append(Setting(prefix, {}, folder.name_of(path)))  # it may set no key
        for setting in document.settings:
            checked, problems = check_setting(replace(setting, path=(*prefix, *setting.path)))
            findings += problems
            level += checked
        if package in chosen:
            chosen[package] += level
        else:
            findings += stack.apply_level(level)
        applied.append(AppliedFile(config_path, document, level, folder.is_shipped))
    for group, settings in chosen.items():
        note = f"(chosen by {choices[group].source})"
        inside = [key for key in stack.layers if key.startswith(f"{group}.") and stack.is_set(key)]
        replaced |= {key: stack.layers[key][-1] for key in inside}
        stack.reset(group, f"{DEFAULT_SOURCE} {note}")
        findings += stack.apply_level(settings, note)
    findings += overridden_keys(stack, applied)
    return replaced


def _warn_of_replaced_values(
    config: RunConfig, replaced: Mapping[str, Layer], asked: Overrides
) -> Iterator[Finding]:
    """Yield at most one warning, which lists the recipe's values that chosen options replaced.

    A value typed on the command line is not listed, nor a key that the new option does not have.
    """
    plain, typed = to_plain(config), {setting.key for setting in asked.settings}
    dropped, back, groups = [], [], dict[str, None]()
    for key, layer in replaced.items():
        *above, name = key.split(".")
        section = plain
        for each in above:
            section = section.get(each, {})
        if key in typed or section.get(name, layer.value) == layer.value:
            continue
        override = redact_setting(f"{key}={as_override(layer.value)}")
        dropped.append(f"{override} ({layer.source})")
        back.append(quote(override))
        groups[above[0]] = None
    if dropped:
        chosen = ", ".join(asked.choices[group].source for group in groups)
        verb = "drops" if len(groups) == 1 else "drop"
        yield Finding(
            rule=DROPPED,
            message=f"{chosen} {verb} what the recipe set: {', '.join(dropped)}",
            hint=f"to keep {'it' if len(back) == 1 else 'them'}: {' '.join(back)}",
            severity=Severity.warning,
            source=chosen,
        )


def _fill_head(stack: Stack) -> None:
    """Set the size of the model's head and the number of its future blocks, which the objective
    decides.
    """
    config = from_plain(RunConfig, stack.plain)
    spec, section = load_spec("objective", config.objective.kind), config.objective
    wanted = {
        "score_outputs": None if spec.head is None else spec.head.outputs(section),
        "future_blocks": None if spec.future_blocks is None else spec.future_blocks(section),
    }
    for name, number in wanted.items():
        if number != getattr(config.model, name):
            source = f"objective.kind={section.kind}"
            stack.apply([Setting(("model", name), number, source)])


def _fill_model(stack: Stack, typed: Set[str]) -> list[Finding]:
    """Fill shape and weights from `model.path`, and return the findings.

    Values from `model.path` take the precedence of whichever source set `model.path`. A key that
    was typed, or set in the same file, wins over the directory, with a warning. A key set in a
    file loses to a directory named on the command line. A model that stays `hf` always follows
    its directory.
    """
    model = from_plain(RunConfig, stack.plain).model
    if not model.is_directory:
        return []
    try:
        read = fill_from_directory(model)
    except TrainctlError as error:
        wrong = error.findings or (
            Finding(rule=NO_MODEL, message=error.message, hint=error.hint, key="model.path"),
        )
        return [finding.set_by(_last_source(stack, "model.path")) for finding in wrong]
    findings = list(_apply_directory(stack, model, read, typed))
    tokenizer = from_plain(RunConfig, stack.plain).tokenizer
    has_path = not isinstance(tokenizer, TokenizerFromPath) or tokenizer.path is not None
    if not has_path and load_spec("tokenizer", tokenizer.kind).is_directory:
        stack.apply([Setting(("tokenizer", "path"), read.path, f"{model.path}")])
    if not _has_error(findings):
        findings += _fill_anatomy(stack)
    return findings


def _apply_directory(
    stack: Stack, model: ModelConfig, read: ModelConfig, typed: Set[str]
) -> Iterator[Finding]:
    """Set the keys of `model` that its directory decides, and yield the findings."""
    had, filled = to_plain(model), to_plain(read)
    source = f"{model.path}/config.json"
    for name in (*DIRECTORY_FIELDS, *read.own_keys):
        key, value = f"model.{name}", filled[name]
        own = had.get(name)
        has_own = stack.is_set(key) and name not in CONFLICT_FREE_FIELDS
        if own == value:
            continue
        if has_own and (key in typed or "model.path" not in typed):
            if read.is_directory and name not in OVERRIDABLE_FIELDS:
                message = f"{key}={own}, and {source} has {value}: transformers builds this "
                message += "architecture from that file alone"
                hint = f"change it there, in a copy of the directory, or leave {key} out"
                yield _directory_finding(stack, key, message, hint, is_error=True)
                continue
            message = f"{own} replaces {value} of {source}"
            hint = f"leave {key} out to keep the directory's value"
            stack.layers[key].insert(0, Layer(source, value))
            yield _directory_finding(stack, key, message, hint)
            continue
        if has_own:
            message = f"{own} gives way to {value} of {source}, which the command line names"
            hint = f"{key}={own} on the command line keeps it"
            yield _directory_finding(stack, key, message, hint)
        set_by = _last_source(stack, key) if name == "path" else source
        stack.apply([Setting(("model", name), value, set_by)])


def _fill_anatomy(stack: Stack) -> list[Finding]:
    """Trace a model without a closed form, so that later counts use its real tensors."""
    config = from_plain(RunConfig, stack.plain)
    table: list[str] = []
    if config.model.needs_trace:
        try:
            table = anatomy_in_child(to_plain(config))
        except TrainctlError as error:
            source = _last_source(stack, "model.path")
            return [
                finding.set_by(_last_source(stack, finding.key) or source)
                for finding in error.findings
            ]
    found = {"anatomy": table, **(expert_counts(table) if table else {})}
    source = f"read from {config.model.path}"
    stack.apply(
        [
            Setting(("model", name), value, source)
            for name, value in found.items()
            if value != getattr(config.model, name)
        ]
    )
    return []


def _last_source(stack: Stack, key: str) -> str:
    """Return the place that set a key, or that set the whole mapping the key is in."""
    while key and key not in stack.layers:
        key = key.rpartition(".")[0]
    return stack.layers[key][-1].source if key else ""


def _directory_finding(
    stack: Stack, key: str, message: str, hint: str, *, is_error: bool = False
) -> Finding:
    return Finding(
        rule=NOT_THE_DIRECTORYS if is_error else NO_EFFECT,
        key=key,
        message=message,
        hint=hint,
        severity=Severity.error if is_error else Severity.warning,
        source=_last_source(stack, key),
    )
