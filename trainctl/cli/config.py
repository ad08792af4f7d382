"""`trainctl config`: show a configuration, and why each value is what it is."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from trainctl import api
from trainctl.cli.arguments import AttemptOption, ConfigDir, Json, TargetAndOverrides, complete_key
from trainctl.cli.console import print_data, print_json, print_message, print_table, show_findings
from trainctl.config.codec import to_plain
from trainctl.config.json_schema import option_schema, recipe_schema, write_schemas
from trainctl.config.literal_secrets import without_secrets
from trainctl.config.overrides import split_target
from trainctl.config.store import dump_config
from trainctl.errors import TrainctlError
from trainctl.launchers.config_questions import explain_value, read_compared
from trainctl.launchers.planning import compose_target
from trainctl.migration.configs.result import ImportResult, LeftOutKey, Why
from trainctl.rules.deepspeed_schema import deepspeed_schema
from trainctl.tuning.config_diff import ComparedConfig, Difference, compare

SIDE = "A recipe, a run directory (or one of its attempts/N), or a file of DeepSpeed's JSON."

app = typer.Typer(
    help="Show a configuration, the sources of its values, and its schema.", add_completion=False
)


@app.command("import")
def import_config(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Configuration file: JSON, YAML, TOML, training_args.bin or a launch script; "
            "several if the program merges them, or with accelerate's configuration.",
        ),
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="Program that the file is for; default: detected by its keys.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="World size that its batch sizes are for; default: derived from the file.",
        ),
    ] = None,
    as_recipe: Annotated[
        bool, typer.Option("--recipe", help="Print a recipe instead of overrides.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the choices and overrides for a configuration of another program.

    Of a launch script, the training command is read, with its ranks; nothing is run.

    The program is DeepSpeed, accelerate, the Trainer (TrainingArguments), TRL, OpenRLHF, Axolotl,
    LLaMA-Factory, GPT-NeoX or torchtitan. What is not carried over is said on stderr, with the
    nearest that there is; so is what the result lacks. What trainctl has no key for in DeepSpeed's
    JSON becomes deepspeed.*.

    Examples: trainctl config import ds_config.json --world-size 8 --recipe > recipes/mine.yaml;
    trainctl config import axolotl.yaml
    """
    imported = api.import_config(*files, tool=tool, world_size=world_size)
    show_findings([each for each in imported.findings if not each.is_error])
    idle = [each for each in imported.left_out if each.why is Why.ignored]
    for line in _left_out_lines(imported):
        print_message(line, style="warning")
    if idle:
        print_message(f"no effect here: {', '.join(each.key for each in idle)}")
    for finding in imported.missing:
        hint = f" ({finding.hint})" if finding.hint else ""
        print_message(f"missing: {finding.key}: {finding.message}{hint}", style="warning")
    if as_json:
        print_json(_import_json_document(imported))
    elif as_recipe:
        print_data(imported.recipe)
    else:
        for override in imported.overrides:
            print_data(quote(override))


def _left_out_lines(imported: ImportResult) -> list[str]:
    lines: dict[tuple[Why, str], list[LeftOutKey]] = {}
    for left in imported.left_out:
        if left.why is not Why.ignored:
            lines.setdefault((left.why, left.reason), []).append(left)
    texts = []
    for (why, reason), keys in lines.items():
        head = {Why.unknown: "unknown", Why.default: "differs by default"}.get(why, "left out")
        named = ", ".join(f"{each.key}={dumps(each.value, default=str)}" for each in keys)
        nearest = "; or ".join(dict.fromkeys(each.nearest for each in keys if each.nearest))
        texts.append(f"{head}: {named}: {reason}{f'; nearest: {nearest}' if nearest else ''}")
    return texts


def _import_json_document(imported: ImportResult) -> dict[str, Any]:
    return {
        "schema": 1,
        "tool": imported.tool,
        "overrides": imported.overrides,
        "carried": list(imported.carried),
        "left_out": [
            {
                "key": left.key,
                "value": left.value,
                "reason": left.reason,
                "nearest": left.nearest,
                "why": left.why.value,
            }
            for left in imported.left_out
        ],
        "missing": [finding.to_json() for finding in imported.missing],
    }


@app.command()
def show(
    target: TargetAndOverrides = None,
    attempt: AttemptOption = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print the composed configuration as YAML.

    Examples: trainctl config show recipe=tiny optimizer.lr=1e-3; trainctl config show runs/NAME
    """
    composed = compose_target(*split_target(target), config_dir, attempt=attempt)
    show_findings(composed.findings)
    if as_json:
        print_json(to_plain(without_secrets(composed.config)))
    else:
        print_data(dump_config(without_secrets(composed.config)).rstrip("\n"))


@app.command()
def deepspeed(
    target: TargetAndOverrides = None, attempt: AttemptOption = None, config_dir: ConfigDir = None
) -> None:
    """Print the JSON that DeepSpeed gets.

    Example: trainctl config deepspeed 7b-zero3 hardware=8xh100-80g
    """
    plan = api.plan(*(target or ()), config_dir=config_dir, attempt=attempt)
    show_findings(plan.findings)
    if not plan.deepspeed_json:
        raise TrainctlError(
            f"engine={plan.details.plan.engine} takes no JSON of DeepSpeed's",
            hint="`trainctl launch --dry-run ...` lists its settings",
        )
    print_json(plan.deepspeed_json)


@app.command()
def why(
    key: Annotated[
        str,
        typer.Argument(
            help="Config key, key of DeepSpeed's JSON, or a quantity such as total_steps.",
            autocompletion=complete_key,
        ),
    ],
    overrides: TargetAndOverrides = None,
    attempt: AttemptOption = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Say what set a value, or how it is derived.

    Example: trainctl config why train_batch_size recipe=tiny
    """
    composed = compose_target(*split_target(overrides), config_dir, attempt=attempt)
    show_findings(composed.findings)
    answer = explain_value(key, composed)
    if as_json:
        print_json(answer.to_json())
        return
    for line in answer.lines():
        print_data(line)


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    right: Annotated[str, typer.Argument(metavar="B", help=SIDE)],
    attempt: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With a run directory as A: attempt to compare."),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print the keys in which two configurations differ, by what they mean.

    Examples: trainctl config diff 7b-zero2 7b-zero3; trainctl config diff ds_config.json 7b-zero3;
    trainctl config diff runs/NAME runs/NAME --attempt 1
    """
    differences = compare(_read_side(left, config_dir, attempt), _read_side(right, config_dir))
    if as_json:
        print_json([{"key": d.key, "left": d.left, "right": d.right} for d in differences])
    else:
        _print_differences(differences, left, right)


def _read_side(name: str, config_dir: Path | None, attempt: int | None = None) -> ComparedConfig:
    side, findings = read_compared(name, config_dir, attempt)
    show_findings(findings)
    return side


def _print_differences(differences: Sequence[Difference], left: str, right: str) -> None:
    if not differences:
        print_message(f"{left} and {right} are the same")
        return
    print_table(("key", left, right), ((d.key, d.left_text, d.right_text) for d in differences))


@app.command()
def schema(
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="[GROUP]",
            help="Config group whose options (conf/GROUP) the schema describes; default: recipes.",
        ),
    ] = None,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Print the schema of DeepSpeed's JSON instead.")
    ] = False,
    config_dir: ConfigDir = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Write the schemas of --config-dir (or this folder) into its .trainctl/.",
        ),
    ] = False,
) -> None:
    """Print a JSON Schema, for an editor that completes and checks YAML or JSON.

    Examples: trainctl config schema > recipe.schema.json; trainctl config schema --write
    """
    if write:
        if deepspeed or group is not None:
            raise TrainctlError("--write takes neither a group nor --deepspeed")
        for path in write_schemas(config_dir or Path.cwd()):
            print_message(f"wrote {path}", style="good")
        return
    if deepspeed:
        if group is not None:
            raise TrainctlError("--deepspeed takes no group")
        print_json(deepspeed_schema())
        return
    print_json(recipe_schema(config_dir) if group is None else option_schema(group))
