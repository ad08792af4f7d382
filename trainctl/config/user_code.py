"""The user's own code: `script`, keys that name a function, and the files that ranks will run.

The code is only inspected here; the ranks import it. What a file certainly lacks is reported before
anything starts.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.config.codec import to_plain, value_at
from trainctl.config.keys import leaves_under
from trainctl.config.layers import Layer
from trainctl.config.literal_secrets import literal_secrets
from trainctl.config.registry import kind_of, load_spec, unit_groups, user_option_file
from trainctl.config.schema import RunConfig
from trainctl.config.suggest import did_you_mean, nearest_names, words
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.models.local_path import local_path

if TYPE_CHECKING:
    from trainctl.config.compose import ComposedConfig

NO_SCRIPT, NO_FUNCTION, NOT_TOGETHER, NOT_APPLIED = "TC116", "TC117", "TC118", "TC119"

WORDS = "the words after --"

TRAINERS_OWN = words(
    """
    callbacks checkpoint data gradients launcher.heartbeat_seconds
    launcher.interrupt_grace_seconds launcher.slow_phase_seconds launcher.stop_grace_seconds
    launcher.straggler_factor logging.profile_steps model.factory model.initial_weights
    model.mup model.mup_base_head_dim model.mup_base_width model.weights objective schedule
    stability tokenizer training.batch_ramp training.evaluate_every_steps
    training.evaluation_samples training.sample_prompt training.sample_prompts
    training.sample_tokens training.seed training.stop_after_steps training.stop_min_delta
    training.stop_patience training.time_limit_minutes
    """
)
"""Keys and sections that only trainctl's own trainer uses."""


def with_script_arguments(composed: ComposedConfig, words: list[str] | None) -> ComposedConfig:
    """Return the configuration with a script's arguments, and the script's path made absolute.

    A resume from another folder then starts the same file.

    Args:
        words: What followed `--` on the command line; None if there was no `--`.

    Raises:
        TrainctlError: An argument is a literal secret (exit code 2).
    """
    config, layers = composed.config, dict(composed.layers)
    if words is not None:
        config = replace(config, script_arguments=words)
        found = [item.set_by(WORDS) for item in literal_secrets(config)]
        if found:
            raise TrainctlError.from_findings([*composed.findings, *found])
        before = layers.get("script_arguments", ())
        layers["script_arguments"] = (*before, Layer(WORDS, words))
    if config.script is not None:
        config = replace(config, script=str(local_path(config.script).absolute()))
    return replace(composed, config=config, layers=layers)


def has_own_config(config: RunConfig) -> bool:
    """Whether the script's arguments name a DeepSpeed JSON themselves."""
    flag = config.script_config_flag
    return flag is not None and any(
        word == flag or word.startswith(f"{flag}=") for word in config.script_arguments
    )


def function_keys(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and value of each key that names a function of the user's."""
    named = {
        "trainer": config.trainer,
        "model.factory": config.model.factory,
        "data.factory": config.data.factory,
    }
    sources: dict[str, Any] = {"data": config.data}
    sources |= {f"data.sources.{name}": each for name, each in config.data.sources.items()}
    for key, section in sources.items():
        keys = section.filters.get("function") or {}
        named[f"{key}.filters.function.call"] = keys.get("call")
    for name, reward in getattr(config.objective, "rewards", {}).items():
        named[f"objective.rewards.{name}.call"] = getattr(reward, "call", None)
    for key, reference in named.items():
        if reference:
            yield key, reference


def code_settings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and value of each setting that makes trainctl run a function or a program."""
    yield from function_keys(config)
    plain = to_plain(config)
    for key, leaf in leaves_under(plain).items():
        value = value_at(plain, key) if leaf.metadata.get("runs_code") else None
        if value and value != leaf.default:
            yield key, " ".join(value) if isinstance(value, list | dict) else str(value)


def check_user_code(config: RunConfig, folder: Path | None = None) -> list[Finding]:
    """Return problems of the script and the functions, as far as their files show them.

    Args:
        folder: Working directory of the ranks; None is the current directory.
    """
    folder = folder or Path.cwd()
    findings = [*_check_script(config), *_check_together(config)]
    for key, reference in function_keys(config):
        findings += _check_function(key, reference, folder)
    return findings


def _check_script(config: RunConfig) -> Iterator[Finding]:
    if config.script is None:
        return
    path = local_path(config.script)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        hint = "give the path of a program; its arguments go behind --"
        yield Finding(rule=NO_SCRIPT, key="script", message=f"{path} {what}", hint=hint)
    elif path.suffix != ".py" and not os.access(path, os.X_OK):
        yield Finding(
            rule=NO_SCRIPT,
            key="script",
            message=f"{path} is neither a Python file (.py) nor executable",
            hint=f"chmod +x {path}, or name it {path.stem}.py",
        )


def _check_together(config: RunConfig) -> Iterator[Finding]:
    if config.script is not None and config.trainer is not None:
        yield Finding(
            rule=NOT_TOGETHER,
            key="trainer",
            message="script and trainer each take the place of trainctl's trainer",
            hint="keep one of the two",
        )
    if config.script is None and config.script_arguments:
        yield Finding(
            rule=NOT_TOGETHER,
            key="script_arguments",
            message=f"{' '.join(config.script_arguments)} goes to no script",
            hint="name it with script=FILE; overrides stand before --",
        )


def _check_function(key: str, reference: str, folder: Path) -> Iterator[Finding]:
    module, _, name = reference.partition(":")
    parts = module.split(".")
    is_file = module.endswith(".py")
    if is_file or not all(part.isidentifier() for part in (*parts, name)):
        hint = "write module:function, such as my_package.training:train"
        if is_file:
            dotted = module.removesuffix(".py").replace("/", ".")
            hint = f"write the module's name: {dotted}:{name or 'function'}"
        yield Finding(
            rule=NO_FUNCTION, key=key, message=f"{reference!r} names no function", hint=hint
        )
        return
    found = find_module(module, folder)
    if isinstance(found, str):
        yield Finding(
            rule=NO_FUNCTION,
            key=key,
            message=f"there is no module {found}",
            hint=f"it is looked for in {folder}, in PYTHONPATH and among what is installed",
        )
        return
    names = top_level_names(found) if found is not None else None
    if names is not None and name not in names:
        yield Finding(
            rule=NO_FUNCTION,
            key=key,
            message=f"{found} defines no {name}",
            hint=did_you_mean([f"{module}:{each}" for each in nearest_names(name, names)]),
        )


def find_module(module: str, folder: Path) -> Path | str | None:
    """Find the file of a module as `python -m` run in `folder` would, importing nothing.

    Returns:
        The source file; None for a module without one (a namespace, an extension); or, as text, the
        first part of the name that is not found.
    """
    parts = module.split(".")
    where: list[str] | None = [str(folder), *sys.path]
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        if length == 1 and name in sys.builtin_module_names:
            return None
        # The last part only: resolving a dotted name would import the parent packages.
        spec = PathFinder.find_spec(parts[length - 1], where)
        if spec is None:
            return name
        where = list(spec.submodule_search_locations or [])
    source = Path(spec.origin) if spec is not None and spec.origin else None
    return source if source is not None and source.suffix == ".py" else None


def parse_python_file(file: Path) -> ast.Module | None:
    """Return the syntax tree of a Python file; None if it cannot be read or parsed.

    Errors, and Python's warnings such as one of a wrong escape sequence, are left to the ranks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None


def top_level_names(file: Path) -> set[str] | None:
    """Return the names that a module binds at its top level; None if only running it would tell."""
    tree = parse_python_file(file)
    if tree is None:
        return None
    names: set[str] = set()
    pending: list[ast.AST] = [*tree.body]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in ("globals", "exec", "setattr"):
                return None
        pending += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__"} else names


def ignored_trainer_settings(composed: ComposedConfig) -> list[Finding]:
    """Return findings for settings of trainctl's trainer where a script or function trains."""
    config = composed.config
    if config.trains_itself:
        return []
    who = "the script" if config.script is not None else "your function"
    findings = [
        Finding(
            rule=NOT_APPLIED,
            key=key,
            message=f"{key} has no effect by itself: trainctl's trainer would act on it",
            hint=f"{who} finds it in the plan (TRAINCTL_PLAN), and may act on it",
            severity=Severity.warning,
            source=layers[-1].source,
        )
        for key, layers in composed.layers.items()
        if layers[-1].source in composed.overrides and _is_trainer_setting(key)
    ]
    if config.script is not None and has_own_config(config):
        findings.append(
            Finding(
                rule=NOT_APPLIED,
                key="script_arguments",
                message=f"the script is given a JSON of its own by {config.script_config_flag}: "
                "what is checked and budgeted here is not what it trains with",
                hint=f"leave {config.script_config_flag} out: trainctl adds it",
                severity=Severity.warning,
                source=composed.source_of("script_arguments"),
            )
        )
    schedule = config.schedule
    steady = load_spec("schedule", schedule.kind).is_flat and schedule.warmup_steps == 0
    if not steady and "scheduler" not in config.deepspeed:
        findings.append(
            Finding(
                rule=NOT_APPLIED,
                key="schedule",
                message=f"DeepSpeed's JSON has the peak optimizer.lr and no scheduler: {who} has "
                "to warm up and decay the learning rate",
                hint="the plan has the schedule; or leave it to DeepSpeed with deepspeed.scheduler",
                severity=Severity.warning,
            )
        )
    return findings


def _is_trainer_setting(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in TRAINERS_OWN)


_INSTALLED = {"site-packages", "dist-packages"}
_TRAINCTL = Path(__file__).parents[1]


def user_code_files(config: RunConfig, folder: Path) -> list[Path]:
    """Return the files of the user's code that the ranks run, sorted.

    They are the script, the modules of functions, options of the user's folder, and the modules
    that these import. Installed packages and trainctl are left out. What only running the code
    would tell is not found: modules imported by computed names, and files that the code reads.

    Args:
        config: Configuration with an absolute `script`.
        folder: Working directory of the ranks.
    """
    found: dict[Path, None] = {}
    pending: list[tuple[Path, str, Path]] = []  # file, module name, import root
    if config.script is not None:
        script = Path(config.script)
        pending.append((script, "", script.parent))
    chosen = [(group, kind_of(getattr(config, group))) for group in unit_groups()]
    for group, name in [*chosen, *(("callbacks", name) for name in config.callbacks)]:
        option = user_option_file(group, name)
        pending += [(option, "", option.parent)] if option is not None else []
    for _, reference in function_keys(config):
        pending += _module_files(reference.partition(":")[0], folder)
    while pending:
        file, module, where = pending.pop()
        if file in found or _is_installed(file) or not file.is_file():
            continue
        found[file] = None
        if file.suffix == ".py":
            for name in _imported_names(file, module):
                pending += _module_files(name, where)
    return sorted(found)


def _module_files(name: str, where: Path) -> Iterator[tuple[Path, str, Path]]:
    """Yield the files of a module and of the packages that contain it, as far as they exist."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        file = find_module(module, where)
        if isinstance(file, str):
            return
        if file is not None:
            yield file.absolute(), module, where
            if _is_installed(file):
                return


def _imported_names(file: Path, module: str) -> Iterator[str]:
    """Yield the names of modules that a file imports anywhere, and possibly of objects in them."""
    tree = parse_python_file(file)
    if tree is None:
        return
    package = module.split(".") if module else []
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_installed(file: Path) -> bool:
    homes = (sysconfig.get_path("stdlib"), _TRAINCTL)
    return bool(_INSTALLED & set(file.parts)) or any(file.is_relative_to(home) for home in homes)
