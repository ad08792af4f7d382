"""Arguments and options that several commands share, and shell completion of overrides.

Completion suggests recipes, options of groups, keys and their values, each as a whole override,
because shells put a space behind the only one that fits. It reads no file, and imports neither
Hydra nor YAML.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import typer

from trainctl import api
from trainctl.config.catalog import (
    Folder,
    option_names,
    recipe_names,
    search_folders,
    split_hardware,
)
from trainctl.config.keys import Leaf, leaves
from trainctl.config.registry import register_options
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.errors import TrainctlError
from trainctl.runs.directory import DEFAULT_ROOT, is_run

Suggestions = list[tuple[str, str]]
"""Words with their descriptions, for shells that show them."""


def complete_overrides(incomplete: str, ctx: typer.Context | None = None) -> Suggestions:
    """Return overrides that start with `incomplete`, including options of `--config-dir`."""
    words = _suggest_overrides(incomplete, _search_folders(ctx))
    found = {word: doc for word, doc in words if word.startswith(incomplete)}
    return sorted(found.items())


def complete_target(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Complete a recipe or run directory if it comes first, and overrides everywhere."""
    found = complete_overrides(incomplete, ctx)
    if any(ctx.params.get(name) for name in ("target", "run", "overrides")):
        return found
    recipes = recipe_names(_search_folders(ctx))
    targets = [
        *((name, "a recipe") for name in recipes),
        *((run, "a run") for run in _suggest_runs()),
    ]
    return [*(each for each in targets if each[0].startswith(incomplete)), *found]


def complete_key(incomplete: str) -> Suggestions:
    """Return the configuration keys that start with `incomplete`."""
    found = leaves().values()
    return [(leaf.key, leaf.metadata["doc"]) for leaf in found if leaf.key.startswith(incomplete)]


def answer_bash(app: typer.Typer, environment: MutableMapping[str, str]) -> str:
    """Return completions for bash, which splits words at each `=`.

    Bash passes `optimizer=ad` as three words and inserts the answer in place of the third. The
    three are joined for Typer, and its answers cut to the part that bash inserts.
    """
    words = environment["COMP_WORDS"].split("\n")
    cursor = min(int(environment["COMP_CWORD"]), len(words) - 1)
    whole = _rejoin_words(words[: cursor + 1])
    environment["COMP_WORDS"] = "\n".join(whole)
    environment["COMP_CWORD"] = str(len(whole) - 1)
    answers = StringIO()
    with redirect_stdout(answers), suppress(SystemExit):
        app(prog_name="trainctl")
    head, equals, _ = whole[-1].rpartition("=")
    there = f"{head}{equals}"
    lines = answers.getvalue().splitlines(keepends=True)
    return "".join(line.removeprefix(there) for line in lines)


def _rejoin_words(words: list[str]) -> list[str]:
    whole: list[str] = []
    for index, word in enumerate(words):
        if whole and (word == "=" or words[index - 1] == "="):
            whole[-1] += word
        else:
            whole.append(word)
    return whole


def _suggest_overrides(incomplete: str, folders: list[Folder]) -> Iterator[tuple[str, str]]:
    """Yield overrides to choose from; options only of the group that is being typed."""
    yield from ((f"recipe={name}", "a recipe") for name in recipe_names(folders))
    for group in GROUPS:
        if f"{group}=".startswith(incomplete) or incomplete.startswith(f"{group}="):
            counted = _hardware_count_prefix(incomplete) if group == "hardware" else ""
            for option in option_names(folders, group):
                yield f"{group}={counted}{option}", f"an option of {group}"
    for group in LIST_GROUPS:
        if f"{group}=[".startswith(incomplete) or incomplete.startswith(f"{group}="):
            for option in option_names(folders, group):
                yield f"{group}=[{option}]", f"an option of {group}"
    for leaf in leaves().values():
        if leaf.key != "recipe" and not leaf.is_mapping:
            for value in _suggest_values(leaf):
                yield f"{leaf.key}={value}", leaf.metadata["doc"]


def _suggest_values(leaf: Leaf) -> list[str]:
    """Return all values of a key that has few, else its default as a value to edit."""
    kinds, default = get_args(leaf.hint) or (leaf.hint,), leaf.default
    found: list[str] = ["null"] if type(None) in kinds else []
    if bool in kinds:
        return [*found, "true", "false"]
    if leaf.choices:
        is_list = get_origin(leaf.hint) is list
        return [*found, *(f"[{name}]" if is_list else name for name in leaf.choices)]
    if isinstance(default, (int, float, str)) and len(f"{default}".split()) == 1:
        found.append(str(default))
    return found


def _hardware_count_prefix(incomplete: str) -> str:
    """Return the count in front of a hardware option: `4x8x` of `hardware=4x8xh1`."""
    written = incomplete.partition("=")[2]
    option = split_hardware(f"{written}_")[2]  # `_` stands in for an empty option
    return f"{written}_".removesuffix(option)


def _search_folders(ctx: typer.Context | None) -> list[Folder]:
    """Return the folders to search; without `--config-dir` if it cannot be used (the command says
    why).
    """
    with suppress(TrainctlError):
        return search_folders(ctx.params.get("config_dir") if ctx is not None else None)
    return search_folders()


def _suggest_runs() -> list[str]:
    folders = sorted(DEFAULT_ROOT.iterdir()) if DEFAULT_ROOT.is_dir() else []
    return [str(folder) for folder in folders if isinstance(folder, Path) and is_run(folder)]


def register_config_dir(ctx: typer.Context, value: Path | None) -> Path | None:
    """Register the options of the folder `--config-dir`, before any command looks options up.

    Raises:
        TrainctlError: The folder has Python options, and neither `--trust-code` nor the environment
            allows them.
    """
    if value is not None:
        register_options(value, is_trusted=ctx.find_root().params["trust_code"])
    return value


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Configuration: recipe=NAME, GROUP=OPTION, KEY=VALUE.",
        autocompletion=complete_overrides,
    ),
]
TargetAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE|RUN] OVERRIDES",
        help="A recipe or a run directory, then GROUP=OPTION, KEY=VALUE.",
        autocompletion=complete_target,
    ),
]
RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] OVERRIDES",
        help="A recipe, then GROUP=OPTION, KEY=VALUE.",
        autocompletion=complete_target,
    ),
]
AttemptOption = Annotated[
    int | None,
    typer.Option(
        "--attempt",
        metavar="N",
        min=1,
        help="Attempt of a run whose configuration to use; default: the newest that trained.",
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="Folder with your own conf/ and recipes/; the current folder is always searched.",
        callback=register_config_dir,
    ),
]


def check_chart_file(path: Path | None) -> Path | None:
    """Refuse a file that no chart can be written to, before any work."""
    if path is not None:
        from trainctl.monitor.report.figure import check_target

        check_target(path)
    return path


Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also draw a chart into this .png, .svg or .html file.",
        callback=check_chart_file,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print plan, budget and commands; start nothing.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Start even if the memory budget does not fit.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the plan's reasons and the whole memory budget."),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        "-d",
        help="Start in the background and return; follow with `trainctl runs attach`.",
    ),
]

Run = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="Run directory; default: the newest run.")
]
RunOrUrl = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|URL]", help="Run directory, or URL of its mirror; default: the newest run."
    ),
]
NamedRunOrUrl = Annotated[
    str, typer.Argument(metavar="RUN|URL", help="Run directory, or URL of its mirror.")
]
NamedRun = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Step = Annotated[
    int | None, typer.Option(metavar="N", help="Checkpoint after N steps; default: the newest.")
]
Best = Annotated[bool, typer.Option("--best", help="Checkpoint with the lowest held-out loss.")]


WhichWeights = Annotated[
    Literal["raw", "ema"],
    typer.Option(
        "--weights",
        help="raw: the trained weights; ema: their moving average (training.ema_decay).",
    ),
]


OnDevice = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="auto: an accelerator with enough free memory, else the CPU."),
]


def open_run_or_newest(path: str | Path | None) -> api.Run:
    """Return the named run, or the one that was made last."""
    return api.Run.newest() if path is None else api.Run(path)


NamedRuns = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
