"""`trainctl config`: look at what a configuration is, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl.cli.arguments import ConfigDir, Json, Overrides, TargetAndOverrides, split_target
from trainctl.errors import TrainctlError

if TYPE_CHECKING:
    from trainctl.cli.planning import Planned
    from trainctl.config.compose import Composed
    from trainctl.plan.types import RunPlan

app = typer.Typer(help="Look at a configuration: its values, and why.", rich_markup_mode="rich")


@app.command()
def show(
    target: TargetAndOverrides = None, config_dir: ConfigDir = None, as_json: Json = False
) -> None:
    """Print the composed configuration as YAML.

    Examples: trainctl config show recipe=tiny optimizer.lr=1e-3; trainctl config show runs/NAME
    """
    from trainctl.cli.console import print_json, put
    from trainctl.cli.findings import show_findings
    from trainctl.cli.planning import compose_target
    from trainctl.config.codec import to_plain
    from trainctl.config.store import dump_config

    composed = compose_target(*split_target(target), config_dir)
    show_findings(composed.findings)
    if as_json:
        print_json(to_plain(composed.config))
    else:
        put(dump_config(composed.config).rstrip("\n"))


@app.command()
def deepspeed(target: TargetAndOverrides = None, config_dir: ConfigDir = None) -> None:
    """Print the JSON that DeepSpeed gets.

    Example: trainctl config deepspeed 7b-zero3 hardware=8xh100-80g
    """
    from trainctl.cli.console import print_json
    from trainctl.cli.findings import show_findings
    from trainctl.cli.planning import compose_target, plan

    planned = plan(compose_target(*split_target(target), config_dir))
    made = _plan_of(planned)
    show_findings(planned.findings)
    print_json(made.deepspeed)


@app.command()
def why(
    key: Annotated[
        str,
        typer.Argument(
            help="A config key, a key of DeepSpeed's JSON, or a quantity such as total_steps."
        ),
    ],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Say what set a value, or how it is derived.

    Example: trainctl config why train_batch_size recipe=tiny
    """
    from trainctl.cli.console import print_json, put
    from trainctl.cli.planning import compose_target, plan

    composed = compose_target(*split_target(overrides), config_dir)
    answer = _explain(key, composed, plan(composed))
    if as_json:
        print_json(answer)
        return
    put(f"{key} = {answer['value']}")
    if answer["reason"]:
        put(f"  because: {answer['reason']}")
    for layer in answer["layers"]:
        put(f"  {layer['value']}  set by {layer['source']}")
    if not answer["reason"] and not answer["layers"]:
        put("  the default of the schema")
    if answer["doc"]:
        put(f"  {answer['doc']}")


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A recipe or a run directory.")],
    right: Annotated[str, typer.Argument(metavar="B", help="A recipe or a run directory.")],
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print the keys in which two configurations differ.

    Example: trainctl config diff 7b-zero2 7b-zero3
    """
    from trainctl.cli.console import print_json
    from trainctl.cli.planning import compose_target
    from trainctl.config.codec import to_plain
    from trainctl.config.diff import diff as compare

    changes = compare(
        compose_target(left, (), config_dir).config, compose_target(right, (), config_dir).config
    )
    if as_json:
        print_json(
            [{"key": c.key, "left": to_plain(c.left), "right": to_plain(c.right)} for c in changes]
        )
    else:
        _print_changes(changes, left, right)


def _print_changes(changes: list[Any], left: str, right: str) -> None:
    from rich.table import Table

    from trainctl.cli.console import rich_console, say
    from trainctl.config.codec import to_plain

    if not changes:
        say(f"{left} and {right} are the same")
        return
    table = Table("key", left, right, box=None, pad_edge=False)
    for change in changes:
        table.add_row(change.key, str(to_plain(change.left)), str(to_plain(change.right)))
    rich_console().print(table)


def _plan_of(planned: Planned) -> RunPlan:
    if planned.assessment.plan is None:
        raise TrainctlError.from_findings(planned.findings)
    return planned.assessment.plan


def _explain(key: str, composed: Composed, planned: Planned) -> dict[str, Any]:
    """Value, reason, the layers that set it and its documentation.

    What was typed can be explained even where no plan can be made of it.
    """
    from trainctl.config.codec import to_plain
    from trainctl.config.schema import walk

    values = {name: to_plain(value) for name, _, value in walk(composed.config)}
    docs = {name: item.metadata["doc"] for name, item, _ in walk(composed.config)}
    made = planned.assessment.plan
    derived = {item.key: item for item in made.derived} if made else {}
    if key not in values and key not in derived:
        if made is None:
            raise TrainctlError.from_findings(planned.findings)
        raise _unknown_key(key, [*values, *derived])
    layers = composed.layers.get(key, ())
    return {
        "key": key,
        "value": to_plain(derived[key].value) if key in derived else values[key],
        "reason": derived[key].reason if key in derived else "",
        "layers": [{"source": each.source, "value": to_plain(each.value)} for each in layers],
        "doc": docs.get(key, ""),
    }


def _unknown_key(key: str, known: list[str]) -> TrainctlError:
    from trainctl.config.suggest import nearest

    # A short key, such as `lr`, is most likely the end of a longer one.
    near = [name for name in known if name.rpartition(".")[2] == key] or nearest(key, known)
    hint = f"did you mean {', '.join(near)}?" if near else "trainctl config show lists the keys"
    return TrainctlError(f"there is no key or quantity {key}", hint=hint)
