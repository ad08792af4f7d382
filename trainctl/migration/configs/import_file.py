"""Import of a configuration file of another program, detected by its content."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.reading import read_bytes
from trainctl.config.yaml_files import EXPONENT, MOST_BYTES, read_scalar
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.migration.configs.import_json import import_json_file
from trainctl.migration.configs.import_table import SIZES, flatten, import_document
from trainctl.migration.configs.pickled import read_pickled
from trainctl.migration.configs.result import ImportResult
from trainctl.migration.configs.tables import DEEPSPEED, detect, load_table, tool_names
from trainctl.models.directory import NO_MODEL, is_hub_name

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
    document = _merge({each: read_document(each) for each in files})
    if tool is None:
        keys = {*document, *(key for key, _ in flatten(document))}
        matching = [name for name in tool_names() if load_table(name).matches(keys)]
        if not matching and _is_json(file) and len(files) == 1:
            return import_json_file(file, world_size)
        tool = detect(document, keys, file=str(file))
    table = load_table(tool)
    imported = import_document(table, document, folder=file.parent, world_size=world_size)
    names = " and ".join(each.name for each in files)
    return _settle(replace(imported, file=names), dict(flatten(document, table)), world_size)


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
    start = read_bytes(file, most_bytes=MOST_BYTES).lstrip()[:1]
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
    try:
        text = read_bytes(file, most_bytes=MOST_BYTES).decode("utf-8")
        if file.suffix in SCRIPTS:
            document: Any = _with_numbers(_read_command(text))
        elif file.suffix == ".toml":
            document = tomllib.loads(text)
        elif _is_json(file):
            document = _read_json(text)
        else:
            document = _with_numbers(yaml.safe_load(text))
    except OSError as error:
        raise TrainctlError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise TrainctlError(f"{file} cannot be read: {words[:200]}") from None
    if not isinstance(document, dict):
        raise TrainctlError(
            f"{file} holds no mapping of keys",
            hint="a configuration of another program: YAML, JSON, TOML, or a script that starts it",
        )
    return document


SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".args")
_PROGRAM = re.compile(r"(?<![\w.])(openrlhf)\.cli\.(train_\w+)")

_ARRAY = re.compile(r"(?ms)^\s*(\w+)=\(\s*\n(.*?)^\s*\)")
_VARIABLE = re.compile(r'(?m)^\s*(?:export |readonly )?(\w+)="?([^\s"\'$(`]+)"?\s*$')
"""Assignments of arrays and of plain texts in a shell script."""


def _read_command(text: str) -> dict[str, Any]:
    """Return the options of the first training command in a shell script, with dotted keys.

    Arrays and variables that the script sets to plain texts are inserted. The program has the key
    of its package: `openrlhf: train_sft`. A file of options alone has none.

    Raises:
        ValueError: Its quotes do not match, or there is no option.
    """
    text = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text))
    lines = text.splitlines()
    line = next((line for line in lines if _PROGRAM.search(line)), " ".join(lines))
    for array, content in _ARRAY.findall(text):
        inserted = " ".join(content.split()).replace("\\", r"\\")
        line = re.sub(rf'"?\$\{{{array}\[@\]\}}"?', inserted, line)
    variables = dict(_VARIABLE.findall(text))
    line = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), line)
    program = _PROGRAM.search(line)
    options: dict[str, list[Any]] = {}
    name = ""
    for word in shlex.split(line[program.end() :] if program else line, comments=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = [read_scalar(value)] if equals else []
        elif name:
            options[name].append(read_scalar(word))
    if not options:
        raise ValueError("there is no command with options in it")
    found: dict[str, Any] = {program[1]: program[2]} if program else {}
    for name, each in options.items():
        found[name] = True if not each else each[0] if len(each) == 1 else each
    return found


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # what only DeepSpeed reads, with a message of its own
        return {}


def _with_numbers(value: Any) -> Any:
    """Return a document with numbers in place of texts such as `2e-5`, which YAML 1.1 makes."""
    if isinstance(value, dict):
        return {str(key): _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and EXPONENT.match(value) else value


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
    return imported.choices.get("model") == "hf" and not (path and Path(str(path)).is_dir())


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
