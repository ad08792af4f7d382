"""Tables of trainctl's changes to other packages, and of undocumented parts that it uses.

Each use is declared with the definition that it was written for. If the installed version of the
package has another definition, no run that needs it starts. The tables are data, and definitions
are read from the installed files: nothing is imported. So the command line, which imports no torch,
can compare them, and a rank can before it imports torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainctl.config.schema import (
    CrossEntropyKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.errors import ExitCode, Finding, Severity
from trainctl.options.activation_checkpointing import recomputing_section, selective
from trainctl.options.adapter import low_rank
from trainctl.options.data import spec_of
from trainctl.options.engine import engine_of, fsdp2
from trainctl.options.optimizer import adamw_8bit
from trainctl.options.precision import loss_scaling
from trainctl.plans.gathering import gathers_blocks
from trainctl.plans.mixture import sources_of
from trainctl.plans.settings import uses_ring


@dataclass(frozen=True, slots=True)
class Need:
    """Condition on a configuration."""

    key: str
    """Configuration key that decides; empty if the condition always holds."""
    holds: Callable[[RunConfig], bool]
    """Returns True if a configuration meets the condition."""


ALWAYS = Need("", lambda config: True)

CHAT = Need(
    "data.kind",
    lambda config: any(spec_of(each).encoder for each in sources_of(config.data).values()),
)

DEEPSPEED_JSON = Need("engine.kind", lambda config: engine_of(config).takes_json)
FSDP2 = Need("engine.kind", lambda config: config.engine.kind == fsdp2.SPEC.name)

STAGE_0 = Need("zero_stage.stage", lambda config: config.zero_stage.stage == 0)
STAGES_1_2 = Need("zero_stage.stage", lambda config: config.zero_stage.stage in (1, 2))
STAGE_3 = Need("zero_stage.stage", lambda config: config.zero_stage.stage == 3)
GATHERED_BLOCKS = Need("zero_stage.gather", gathers_blocks)
PARTITIONED = Need("zero_stage.stage", lambda config: config.zero_stage.stage > 0)

OPTIMIZER_ON_HOST = Need(
    "offload.optimizer",
    lambda config: (
        config.zero_stage.stage < 3 and config.offload.optimizer is not OffloadDevice.none
    ),
)
OPTIMIZER_ON_NVME = Need(
    "offload.optimizer", lambda config: config.offload.optimizer is OffloadDevice.nvme
)
PARAMETERS_ON_NVME = Need(
    "offload.parameters", lambda config: config.offload.parameters is OffloadDevice.nvme
)
PART_OFFLOADED = Need("offload.ratio", lambda config: config.offload.ratio < 1)
ZENFLOW = Need("offload.zenflow", lambda config: config.offload.zenflow)

PIPELINE = Need("parallelism.pipeline", lambda config: config.parallelism.pipeline > 1)
SPARSE = Need("model.num_experts", lambda config: (config.model.num_experts or 1) > 1)
EXPERTS = Need("parallelism.expert", lambda config: config.parallelism.expert > 1)
SEQUENCE = Need("parallelism.sequence", lambda config: config.parallelism.sequence > 1)
RING = Need("parallelism.context", uses_ring)
ADAPTED = Need("adapter.kind", lambda config: low_rank(config.adapter) is not None)
MODULE = Need("model.factory", lambda config: config.model.is_module)
TENSOR = Need("parallelism.tensor", lambda config: config.parallelism.tensor > 1)

RECOMPUTED = Need(
    "activation_checkpointing.mode",
    lambda config: recomputing_section(config) is not None,
)
SELECTIVE = Need(
    "activation_checkpointing.mode",
    lambda config: config.activation_checkpointing.mode == selective.SPEC.name,
)
COMPILED = Need("kernels.compile", lambda config: config.kernels.is_compiled)
LIGER_LOSS = Need(
    "kernels.cross_entropy",
    lambda config: config.kernels.cross_entropy is CrossEntropyKind.liger_fused,
)
FP16 = Need("precision.compute", lambda config: loss_scaling(config) is not None)
EIGHT_BIT_MOMENTS = Need(
    "optimizer.kind", lambda config: config.optimizer.kind == adamw_8bit.SPEC.name
)
MUP = Need("model.mup", lambda config: config.model.mup)

RULE = "TC305"
"""Rule of definitions in other packages that differ from the ones trainctl was written for."""


class UseKind(StrEnum):
    """The way in which trainctl uses a definition."""

    replaced = "replaced"
    """trainctl puts other code in its place, for the life of the process or for a while."""
    extended = "extended"
    """trainctl derives a subclass, or gives an existing object another class."""
    called = "called"
    read = "read"
    """trainctl reads or sets an attribute."""


class ProcessKind(StrEnum):
    """The processes that need a definition."""

    rank = "rank"
    model = "model"
    """A rank, or a process that loads a model outside training."""
    trace = "trace"
    """A process that traces a model without its weights."""


@dataclass(frozen=True, slots=True)
class Use:
    """One definition in another package.

    Exactly one of `signature`, `body` and `contains` is set.
    """

    how: UseKind
    definition: str
    """Module and name, such as ``package.module:Class.method``. If trainctl calls or replaces it,
    its parameters with their defaults follow, as in ``package.module:Class.method(self, end=0)``.
    """
    why: str
    """The reason, in one sentence."""
    _: KW_ONLY
    body: str = ""
    """Digest of the definition's code, if trainctl relies on the code's behaviour."""
    contains: str = ""
    """A statement or expression that the definition's code must contain."""
    names: tuple[str, ...] = ()
    """Names by which trainctl's code refers to it, if not by the last part of the target."""
    at: ProcessKind = ProcessKind.rank
    need: Need = ALWAYS
    apply: str = ""
    """Reference (``module:name``) to the function that makes the change for the whole process, at
    the start of a rank.
    """
    upstream: str = ""
    """URL of the upstream issue, if one is known."""
    fallback: str = ""
    """Consequence of a differing definition, as a clause after "So"; empty: the run does not
    start.
    """

    @property
    def target(self) -> str:
        """Module and name of the definition."""
        return self.definition.partition("(")[0]

    @property
    def signature(self) -> str:
        """Parameters of the definition with their defaults; empty if they do not matter."""
        return self.definition.removeprefix(self.target)

    @property
    def name(self) -> str:
        """The target with dots only, as code writes it."""
        return self.target.replace(":", ".")

    def is_needed(self, config: RunConfig) -> bool:
        """Return True if a run of the configuration needs it.

        For a user's own program, only what the agent uses is needed.
        """
        is_ours = config.trains_itself or self.at not in (ProcessKind.rank, ProcessKind.model)
        return is_ours and self.need.holds(config)


replaced = partial(Use, UseKind.replaced)
extended = partial(Use, UseKind.extended)
called = partial(Use, UseKind.called)
read = partial(Use, UseKind.read)


def needed(need: Need, *uses: Use, at: ProcessKind = ProcessKind.rank) -> tuple[Use, ...]:
    """Return uses that the same configurations and processes need."""
    return tuple(replace(use, need=need, at=at) for use in uses)


@cache
def compare_with_installed(use: Use) -> str:
    """Return how the installed definition differs from the declared one; empty if it does not."""
    found = find_definition(use.target)
    if found is None:
        return "is not there"
    if use.contains:
        is_there = use.contains in ast.unparse(found)
        return "" if is_there else f"does not have `{use.contains}`"
    if use.body:
        return "" if definition_digest(found) == use.body else "has other code"
    if not isinstance(found, Function):
        return "is not a function"
    takes = definition_signature(found)
    return "" if takes == use.signature else f"takes {takes}, not {use.signature}"


@dataclass(frozen=True, slots=True)
class Table:
    """All uses of one package."""

    package: str
    """Name of the distribution and of its top-level module."""
    read_in: tuple[str, ...]
    """Versions whose code was read when the table was written."""
    uses: tuple[Use, ...]
    need: Need = ALWAYS
    """Configurations that use the package at all."""

    @property
    def version(self) -> str | None:
        """Installed version; None if the package is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    @property
    def is_installed(self) -> bool:
        """Whether the package can be imported; another check reports packages that must be and are
        not.
        """
        return package_folder(self.package) is not None

    def is_needed(self, use: Use, config: RunConfig) -> bool:
        """Return True if a run of the configuration needs this use."""
        return self.need.holds(config) and use.is_needed(config)

    def needed(self, config: RunConfig, at: Collection[ProcessKind]) -> list[Use]:
        """Return the uses that these processes of a run need."""
        return [use for use in self.uses if use.at in at and self.is_needed(use, config)]

    def differences(self, config: RunConfig, at: Collection[ProcessKind]) -> list[Finding]:
        """Return a finding for each definition that these processes need and whose installed code
        differs.
        """
        if not self.is_installed:
            return []
        found = ((use, compare_with_installed(use)) for use in self.needed(config, at))
        return [self._finding(use, what) for use, what in found if what]

    def replaced(self, config: RunConfig, at: Collection[ProcessKind]) -> list[Finding]:
        """Return a finding for each needed definition that other code in this process has replaced.

        This imports the package.
        """
        if not self.is_installed:
            return []
        found = ((use, _foreign_origin(use.target)) for use in self.needed(config, at))
        return [
            self._finding(use, f"is replaced in this process, by {origin}")
            for use, origin in found
            if origin
        ]

    def _finding(self, use: Use, what: str) -> Finding:
        read_in = ", ".join(self.read_in)
        known = f"it is {use.how} by trainctl, which was written for {self.package} {read_in}"
        return Finding(
            rule=RULE,
            key=use.need.key,
            message=f"{use.name} of {self.package} {self.version} {what}; {known}"
            + (f". So {use.fallback}" if use.fallback else ""),
            hint="" if use.fallback else f"pip install '{self.package}=={self.read_in[-1]}'",
            severity=Severity.warning if use.fallback else Severity.error,
            exit_code=ExitCode.environment,
        )


def _foreign_origin(target: str) -> str:
    """Return the file of the code that has replaced a function; empty if the function is original.

    Code of the packages that trainctl works with counts as original.
    """
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
        found = getattr(found, "__func__", found)  # function of a class, or static method
    code = getattr(inspect.unwrap(found) if callable(found) else None, "__code__", None)
    if code is None:
        return ""
    file = Path(code.co_filename)
    packages = ("trainctl", "torch", "deepspeed", "transformers", "torchao")
    folders = (folder for name in packages if (folder := package_folder(name)))
    return "" if any(map(file.is_relative_to, folders)) else str(file)


Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


def package_folder(package: str) -> Path | None:
    """Return the folder from which a top-level package would be imported; None if it is not
    installed.
    """
    spec = find_spec(package)
    found = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(found[0]) if found else None


def find_definition(target: str) -> Definition | None:
    """Return the last definition of a name in the source of its module; None if there is none.

    Args:
        target: Module and name, such as ``package.module:Class.method``.
    """
    module, _, path = target.partition(":")
    text, indent = _module_text(module), ""
    *owners, name = path.split(".")
    for owner in owners:
        text = _class_source(text, indent, owner)
        indent += "    "
    kinds = rf"(?:async )?def {name}\b|class {name}\b|{name}[ ]*(?::|=(?!=))"
    starts = [match.start() for match in re.finditer(rf"^{indent}(?:{kinds})", text, re.MULTILINE)]
    return _first_statement(text[starts[-1] :].splitlines(), indent) if starts else None


def definition_signature(found: Definition) -> str:
    """Return the parameters of a function with their defaults, without types: what a caller
    depends on.
    """
    assert isinstance(found, Function)
    arguments = found.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    return f"({ast.unparse(arguments)})"


def definition_digest(found: Definition) -> str:
    """Return a digest of the code of a definition, without comments, docstrings, layout and types.

    It is the same on every version of Python, unlike the output of `ast.dump`.
    """
    return hashlib.sha256(_normalized_text(found).encode()).hexdigest()[:12]


@cache
def _module_text(module: str) -> str:
    package, *path = module.split(".")
    folder = package_folder(package)
    if folder is not None:
        place = folder.joinpath(*path)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file.read_text(encoding="utf-8")
    return ""


def _class_source(text: str, indent: str, owner: str) -> str:
    """Return the source of a class, up to the next definition beside it; empty if there is none."""
    ends = rf"\n{indent}(?=(?:class|def|async def|if) |@)"
    found = re.search(rf"^{indent}class {owner}\b", text, re.MULTILINE)
    return re.split(ends, text[found.start() :], maxsplit=1)[0] if found else ""


def _first_statement(lines: list[str], indent: str) -> Definition | None:
    """Return the statement that starts at the first line and ends where indentation returns to it.

    It is parsed alone: parsing a module of thousands of lines takes a hundred times as long.
    """
    cut: list[str] = []
    for line in (*lines, f"{indent}end"):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if cut and not line[len(indent) :][:1].isspace():
            try:
                (found,) = ast.parse("\n".join(cut)).body
            except SyntaxError:  # the line is within brackets or a string
                pass
            else:
                return found if isinstance(found, Definition) else None
        cut.append(line[len(indent) :])
    return None


def _normalized_text(node: object) -> str:
    """Return a syntax tree as text, without positions, types, docstrings and empty fields."""
    if isinstance(node, list):
        return f"[{','.join(_normalized_text(each) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    for name in ("annotation", "returns", "type_comment", "type_params", "ctx", "kind"):
        fields.pop(name, None)
    if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    shown = (
        f"{name}={_normalized_text(value)}"
        for name, value in fields.items()
        if value not in (None, [])
    )
    return f"{type(node).__name__}({','.join(shown)})"
