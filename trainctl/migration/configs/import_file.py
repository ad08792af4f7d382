"""Import of configuration files of other programs, detected by their content."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.reading import read_bytes
from trainctl.config.yaml_files import MOST_BYTES, compose_bounded
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.migration.configs.import_json import import_json_file
from trainctl.migration.configs.import_table import SIZES, flatten, import_document
from trainctl.migration.configs.launch_script import LaunchScript, read_launch_script
from trainctl.migration.configs.pickled import PlainValues, read_pickled
from trainctl.migration.configs.result import ImportResult
from trainctl.migration.configs.shell import Unresolved
from trainctl.migration.configs.tables import DEEPSPEED, KeyTable, detect, load_table, tool_names
from trainctl.models.directory import NO_MODEL, is_hub_name
from trainctl.models.local_path import is_there, local_path

CHECKED_ON = "h100-80g"
"""Devices that a result is checked on if it names none."""


def import_file(
    *files: Path, tool: str | None = None, world_size: int | None = None
) -> ImportResult:
    """Import a configuration of DeepSpeed or of a program that has a table.

    Args:
        files: The file; of a program that merges several, all of them.
        tool: The program; None detects it by the file's keys.
        world_size: Number of ranks; None takes what the file says, if it says anything.

    Raises:
        TrainctlError: A file cannot be read, is of no known program or of several, or is not valid
            for DeepSpeed; or two files have the same key.
    """
    file = files[0]
    if tool == DEEPSPEED and len(files) == 1:
        return import_json_file(file, world_size)
    try:
        scripts = {each: _read_script(each) for each in files if each.suffix in SCRIPTS}
        documents = {
            each: scripts[each].options if each in scripts else read_document(each)
            for each in files
        }
    except TrainctlError:
        if tool is None and len(files) == 1 and file.suffix not in SCRIPTS and _is_json(file):
            return import_json_file(file, world_size)  # with a message of its own
        raise
    launched = {each: _accelerate_document(each, script) for each, script in scripts.items()}
    machines = {each: x for each, x in launched.items() if x and tool != ACCELERATE}
    if tool != ACCELERATE and len(documents) > 1:
        table = load_table(ACCELERATE)
        machines |= {each: x for each, x in documents.items() if table.matches(_keys_of(x))}
        documents = {each: x for each, x in documents.items() if each not in machines} or documents
    document = _merge(documents)
    if tool is None:
        keys = _keys_of(document)
        matching = [name for name in tool_names() if load_table(name).matches(keys)]
        if not matching and len(files) == 1 and file not in scripts and _is_json(file):
            return import_json_file(file, world_size)
        tool = detect(document, keys, file=str(file))
    table = load_table(tool)
    source = dict(flatten(document, table))
    _refuse_unresolved(source, table)
    imported = import_document(table, document, folder=file.parent, world_size=world_size)
    for place, each in machines.items():
        about = load_table(ACCELERATE)
        source = {**dict(flatten(each, about)), **source}
        _refuse_unresolved(source, about)
        other = import_document(about, each, folder=place.parent, world_size=world_size)
        imported = imported.beside(other)
    for script in scripts.values():
        imported = imported.with_machines(script.settings, script.findings)
    names = " and ".join(each.name for each in files)
    return _settle(replace(imported, file=names), source, world_size)


ACCELERATE = "accelerate"


def _keys_of(document: Mapping[str, Any]) -> set[str]:
    """Return the top-level and dotted keys of a document."""
    return {*document, *(key for key, _ in flatten(document))}


def _accelerate_document(file: Path, script: LaunchScript) -> dict[str, Any]:
    """Return accelerate's configuration of a script: its file, and the command's options over it.

    Raises:
        TrainctlError: The file that the command names cannot be read.
    """
    if script.accelerate is None:
        return {}
    named = script.config_file
    place = Path(named) if Path(named).is_absolute() else file.parent / named
    document = read_document(place) if named else {}
    for key, value in script.accelerate.items():
        is_section = isinstance(value, dict) and isinstance(document.get(key), dict)
        document[key] = {**document[key], **value} if is_section else value
    return document


def _refuse_unresolved(source: Mapping[str, Any], table: KeyTable) -> None:
    """Refuse values that only a running shell knows, of keys that mean something here.

    Raises:
        TrainctlError: There is such a value.
    """
    for key, value in source.items():
        entry = table.entry(key)
        if entry is None or not (entry.key or entry.convert):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Unresolved):
                raise TrainctlError(
                    f"line {part.line}: --{key} is {part}, which only a running shell knows",
                    hint="write the value into the script, or leave the option out of it",
                )


def _merge(documents: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of all documents together.

    Raises:
        TrainctlError: Two of them have the same key.
    """
    merged: dict[str, Any] = {}
    places: dict[str, Path] = {}
    for path, document in documents.items():
        for key, value in document.items():
            if key in merged:
                raise TrainctlError(
                    f"{places[key]} and {path} both have {key}", hint="remove it from one of them"
                )
            merged[key], places[key] = value, path
    return merged


def _is_json(file: Path) -> bool:
    if file.suffix in (".yaml", ".yml", ".bin"):
        return False  # YAML in braces, as GPT-NeoX has it, may hold comments and no JSON
    try:
        start = read_bytes(file, most_bytes=MOST_BYTES).lstrip()[:1]
    except (OSError, ValueError):
        start = b""
    return file.suffix == ".json" or start in (b"{", b"[", b"/")


def read_document(file: Path) -> dict[str, Any]:
    """Return the content of a YAML, JSON or TOML file, or of a Trainer's training_args.bin, or the
    options of a training command in a shell script.

    Numbers such as 2e-5 are numbers.

    Raises:
        TrainctlError: It cannot be read, or holds no mapping.
    """
    if file.suffix == ".bin":
        return read_pickled(file)
    text = _read_text(file)
    try:
        if file.suffix in SCRIPTS:
            document: Any = read_launch_script(text, str(file)).options
        elif file.suffix == ".toml":
            document = tomllib.loads(text)
        elif _is_json(file):
            document = json.loads(text)
        else:
            compose_bounded(text)
            document = yaml.safe_load(text)
        document = PlainValues().value(document)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise _unreadable(file, error) from None
    if not isinstance(document, dict):
        raise TrainctlError(
            f"{file} holds no mapping of keys",
            hint="a configuration of another program: YAML, JSON, TOML, or a script that starts it",
        )
    return document


SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".args")


def _read_text(file: Path) -> str:
    try:
        return read_bytes(file, most_bytes=MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise TrainctlError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> TrainctlError:
    words = " ".join(str(error).split()) or type(error).__name__
    return TrainctlError(f"{file} cannot be read: {words[:200]}")


def _read_script(file: Path) -> LaunchScript:
    """Return the options, machines and warnings of a launch script.

    Raises:
        TrainctlError: It cannot be read, or has no training command.
    """
    text = _read_text(file)
    try:
        script = read_launch_script(text, str(file))
        return replace(script, options=PlainValues().value(script.options))
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from None


YIELDING = (
    "activation_checkpointing",
    "kernels",
    "launcher",
    "offload",
    "optimizer.kind",
    "training.freeze",
)
"""Keys and groups that only say how something is computed, or of which parameters: if a plan
refuses one beside the rest, it is left out.
"""

OF_THE_SHAPE = ("TC009", "TC021", "TC376", "TC378")
"""Rules whose answer depends on the model's shape, which a name on the hub does not tell."""


def _settle(
    imported: ImportResult, source: Mapping[str, Any], world_size: int | None
) -> ImportResult:
    """Return the result with its findings, and without the techniques that a plan refuses."""
    while True:
        findings = _check(imported, world_size)
        keys = {*imported.choices, *imported.settings}
        refused = [
            (key, finding)
            for finding in findings
            if finding.is_error and finding.key.startswith(YIELDING)
            for key in (finding.key, finding.key.partition(".")[0])
            if key in keys
        ]
        if not refused:
            absent = _missing_files(imported)
            return replace(imported, findings=(*imported.findings, *findings, *absent))
        key, finding = refused[0]
        imported = imported.without(key, finding.message, finding.hint, source)


def _check(imported: ImportResult, world_size: int | None) -> list[Finding]:
    """Return what a plan of the result would refuse, without asking the hub for a model.

    A model that is not at hand is checked as one of 8B, so that nothing else is hidden by it.
    """
    from trainctl.config.compose import compose_leniently
    from trainctl.hardware import resolve_hardware
    from trainctl.rules.resolve import resolve

    overrides = list(imported.overrides)
    findings = []
    is_stand_in = _needs_stand_in(imported)
    if is_stand_in:
        overrides = [each for each in overrides if not each.startswith(OF_THE_MODEL)]
        overrides += ["model=llama-8b", "tokenizer=hf", "tokenizer.path=DIR"]
        findings.append(_model_finding(imported.settings.get("model.path")))
    if not any(each.startswith("hardware=") for each in overrides):
        is_counted = "hardware.devices_per_node" in imported.settings
        ranks = "" if is_counted else f"{world_size or _fewest_ranks(imported)}x"
        overrides.append(f"hardware={ranks}{CHECKED_ON}")
    composed = compose_leniently(overrides)
    findings += [each for each in composed.findings if each.is_error]
    if not composed.has_error:
        resolution = resolve(composed.config, resolve_hardware(composed.config.hardware))
        findings += [each for each in resolution.findings if each.is_error]
    return [each for each in findings if not (is_stand_in and each.rule in OF_THE_SHAPE)]


def _needs_stand_in(imported: ImportResult) -> bool:
    """Return True if the model is a directory that is not here, or is not named."""
    path = imported.settings.get("model.path")
    return imported.choices.get("model") == "hf" and not (
        path and is_there(local_path(str(path)) / "config.json")
    )


def _missing_files(imported: ImportResult) -> list[Finding]:
    """Return what files the result lacks: errors for unnamed ones, warnings for absent ones.

    Places in a store or on the hub are not asked.
    """
    from trainctl.config.compose import compose_leniently
    from trainctl.tuning.input_files import NO_TEMPLATE, missing_files

    data = {key: value for key, value in imported.settings.items() if key.startswith("data.")}
    skipped: tuple[str, ...] = ("data=", "data.") if "://" in str(data) else ()
    is_stand_in = _needs_stand_in(imported)
    skipped += OF_THE_MODEL if is_stand_in else ()
    composed = compose_leniently([x for x in imported.overrides if not x.startswith(skipped)])
    if composed.has_error:
        return []
    found = [each for each in missing_files(composed.config) if each.is_error]
    if is_stand_in:  # the model's directory has a tokenizer and a template
        found = [x for x in found if x.rule != NO_TEMPLATE and not x.key.startswith("tokenizer")]
    return [
        replace(each, severity=Severity.warning) if imported.settings.get(each.key) else each
        for each in found
    ]


OF_THE_MODEL = ("model=", "model.path=", "model.weights=", "tokenizer=", "tokenizer.path=")


def _model_finding(path: Any) -> Finding:
    """Return the finding on a model that is not at hand: a warning if the hub has it."""
    if path is not None and is_hub_name(str(path)):
        return Finding(
            rule=NO_MODEL,
            key="model.path",
            message=f"{path} is taken from the Hugging Face hub when a plan is made",
            hint=f"without a network: `hf download {path} --local-dir DIR`, and model.path=DIR",
            severity=Severity.warning,
        )
    return Finding(
        rule=NO_MODEL,
        key="model.path",
        message=f"{path} is not a directory" if path else "model=hf needs a transformers directory",
        hint="model.path=DIR, or a name on the Hugging Face hub",
    )


def _fewest_ranks(imported: ImportResult) -> int:
    ranks = 1
    for key in SIZES:
        size = imported.settings.get(key)
        ranks *= size if isinstance(size, int) and size > 0 else 1
    return ranks
