"""The training command of a launch script: its program, options and ranks. Nothing is run.

Launchers are torchrun, DeepSpeed, accelerate and Python, also below srun, mpirun, ray or `bash -c`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from trainctl.config.yaml_files import read_scalar
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.migration.configs.shell import Command, Unresolved, Value, read_commands

SEVERAL, UNKNOWN = "TC572", "TC573"
MOST_DEPTH = 4
"""Maximum depth of scripts in `bash -c`."""
LAUNCHERS = {"torchrun": "torchrun", "deepspeed": "deepspeed", "accelerate": "accelerate"}
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
RANKS = {
    "torchrun": ("nnodes", "nproc_per_node"),
    "deepspeed": ("num_nodes", "num_gpus"),
    "python": ("nodes", "ntasks_per_node"),
}
"""Options for the nodes, and for the ranks of each; Python's are srun's."""
NO_TRAINING = ("echo", "printf", "pip", "pip3", "conda", "which", "command", "git", "apt-get", "[")
"""Commands whose words are no command."""
FLAGS = {
    "torchrun": "standalone no_python m module run_path",
    "deepspeed": "module no_python no_local_rank force_multi no_ssh no_ssh_check save_pid "
    "bind_cores_to_rank enable_each_rank_log",
    "accelerate": "m module no_python quiet multi_gpu cpu use_deepspeed use_fsdp use_megatron_lm "
    "tpu use_xpu debug same_network enable_cpu_affinity",
    "python": "u O OO B E I P s S",
}
"""Options of launchers without a value."""
_OPENRLHF = re.compile(r"openrlhf\.cli\.(train_\w+)")
_PYTHON = re.compile(r"python[\d.]*")
_DIRECTIVE = re.compile(r"(?m)^#SBATCH[ \t]+--?([\w-]+)[ =]+(\S+)")
_SHELLS = ("bash", "sh", "zsh")


@dataclass(frozen=True, slots=True)
class Training:
    """A command that starts a training."""

    line: int
    launcher: str
    program: str
    launch: dict[str, Any]
    """Options of the launcher, with underscores."""
    words: list[str]
    """Words after the program."""
    around: dict[str, Any] = field(default_factory=dict)
    """Options of srun, and of the script's #SBATCH lines."""

    def __str__(self) -> str:
        return f"line {self.line} ({self.launcher} {self.program})"


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """Options, machines and warnings of a launch script."""

    options: dict[str, Any]
    """Options of the program."""
    settings: dict[str, Any] = field(default_factory=dict)
    """trainctl's keys and groups of machines and launcher."""
    accelerate: dict[str, Any] | None = None
    """accelerate's configuration by the options of `accelerate launch`; None without it."""
    config_file: str = ""
    """File of accelerate's configuration that the command names."""
    findings: tuple[Finding, ...] = ()


def read_launch_script(text: str, name: str) -> LaunchScript:
    """Return the options, machines and warnings of a script.

    Args:
        name: Its file, for messages.

    Raises:
        ValueError: It has no training command, or a quote is not closed.
        TrainctlError: A training command has no options.
    """
    around = {key.replace("-", "_"): value for key, value in _DIRECTIVE.findall(text)}
    variables: dict[str, Value | None] = {}
    for variable, key in SLURM_VARIABLES.items():
        if key in around:
            variables[variable] = around[key]
    commands = read_commands(text, variables)
    found = [each for one in commands for each in _trainings(one, variables, around)]
    if not found:
        bare = [each for each in commands if each.words[0].startswith("--")]
        if not bare:
            raise ValueError("there is no command with options in it")
        return LaunchScript(_options([word for each in bare for word in each.words]))
    ranked = [each for each in found if each.launcher != "python" or _OPENRLHF.search(each.program)]
    among = ranked or found
    taken = next((each for each in among if each.words), among[0])
    others = [each for each in ranked if each is not taken]
    options = _options(taken.words)
    if not options:
        files = [
            word for word in taken.words if PurePath(word).suffix in (".yaml", ".yml", ".json")
        ]
        raise TrainctlError(
            f"{name}: {taken} has no options",
            hint=f"trainctl config import {files[0]}" if files else "import its configuration file",
        )
    if options.get("deepspeed") is True:  # the flag of DeepSpeed's own argument parser
        options["deepspeed"] = options.pop("deepspeed_config", "")
    program = _OPENRLHF.search(taken.program)
    if program:
        options = {"openrlhf": program[1], **options}
    launch = taken.launch if taken.launcher == "accelerate" else None
    return LaunchScript(
        options,
        _machines(taken),
        None if launch is None else _accelerate(launch),
        str((launch or {}).get("config_file", "")),
        tuple(_findings(taken, others, name)),
    )


def _findings(taken: Training, others: list[Training], name: str) -> Iterator[Finding]:
    """Yield warnings of what else the script has, and of what only a running shell knows."""
    if others:
        yield Finding(
            rule=SEVERAL,
            message=f"{name}: {taken} is imported, and not {', '.join(map(str, others))}",
            hint="import a file that has the other command alone",
            severity=Severity.warning,
        )
    ranks = taken.launch.get(RANKS.get(taken.launcher, ("", ""))[1])
    if ranks is not None and not _count(ranks):
        yield Finding(
            rule=UNKNOWN,
            key="hardware.devices_per_node",
            message=f"{name}: the ranks of {taken} are {ranks}, which is not known here",
            hint="hardware.devices_per_node=N",
            severity=Severity.warning,
        )
    if any(map(_is_own_arguments, taken.words)):
        yield Finding(
            rule=UNKNOWN,
            message=f"{name}: {taken} gets $@, the arguments of the script, which are not known",
            hint="add them as overrides",
            severity=Severity.warning,
        )


def _is_own_arguments(word: str) -> bool:
    return isinstance(word, Unresolved) and re.match(r"\$(\{?)[@*]", word) is not None


SLURM_VARIABLES = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks_per_node",
    "SLURM_GPUS_PER_NODE": "gpus_per_node",
    "SLURM_GPUS_ON_NODE": "gpus_per_node",
}
"""Variables that Slurm sets, by the directives that say them."""
SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}


def _trainings(
    command: Command, variables: dict[str, Value | None], around: dict[str, Any], depth: int = 0
) -> Iterator[Training]:
    """Yield the training that a command starts, or those of the script that it is given."""
    words = command.words
    if PurePath(words[0]).name in NO_TRAINING:
        return
    if "srun" in words:
        taken, _ = _take(words[words.index("srun") + 1 :], "")
        around = {**around, "srun": True, **{SHORT.get(k, k): v for k, v in taken.items()}}
    for place, word in enumerate(words):
        base, after = PurePath(word).name, words[place + 1 :]
        if (
            base in _SHELLS
            and after[:1]
            and re.fullmatch(r"-\w*c", after[0])
            and depth < MOST_DEPTH
        ):
            inner = read_commands(after[1] if after[1:] else "", variables, command.line)
            for each in inner:
                yield from _trainings(each, variables, around, depth + 1)
            return
        launcher = LAUNCHERS.get(base, "python" if _PYTHON.fullmatch(base) else "")
        if launcher == "accelerate":
            after = after[1:] if after[:1] == ["launch"] else []
        if launcher:
            found = _training(launcher, after, command.line, around)
            if found is not None:
                yield found
            return


def _training(
    launcher: str, words: list[str], line: int, around: dict[str, Any]
) -> Training | None:
    """Return the training of a launcher's words; None if they name no program."""
    if launcher == "python":
        _, words = _take(words, FLAGS["python"], stop="-m")
        if words and words[0] == "-m":
            module = MODULES.get(words[1]) if words[1:] else None
            if module:
                return _training(module, words[2:], line, around)
            words = words[1:]
        launch: dict[str, Any] = {}
    else:
        launch, words = _take(words, FLAGS[launcher])
    if not words or words[0].startswith("-"):
        return None
    return Training(line, launcher, words[0], launch, words[1:], around)


def _take(words: list[str], flags: str, stop: str = "--") -> tuple[dict[str, Any], list[str]]:
    """Return the options that words begin with, and the words after them."""
    taken: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != stop:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not equals and name not in flags.split():
            value = rest.pop(0) if rest else ""
            equals = "="
        taken[name] = _scalar(value, word) if equals else True
    return taken, rest[1:] if rest[:1] == ["--"] else rest


def _scalar(value: str, written: str) -> Any:
    """Return the number, switch or text of a word; what is not resolved stays so."""
    for each in (value, written):
        if isinstance(each, Unresolved):
            return Unresolved(value, each.line)
    return read_scalar(value)


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a program, with dotted keys; one without a value is a switch."""
    options: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = [_scalar(value, word)] if equals else []
        elif name and not _is_own_arguments(word):
            options[name].append(_scalar(word, word))
    return {
        name: True if not each else each[0] if len(each) == 1 else each
        for name, each in options.items()
    }


def _machines(taken: Training) -> dict[str, Any]:
    """Return nodes, ranks of each, and what starts them."""
    around, launch = taken.around, taken.launch
    if taken.launcher not in RANKS:
        return {}
    given = around if taken.launcher == "python" else launch
    nodes, ranks = (given.get(name) for name in RANKS[taken.launcher])
    nodes = around.get("nodes") if nodes is None else nodes
    if taken.launcher == "python" and ranks is None and "ntasks" in around:
        ranks = _count(around["ntasks"]) // max(1, _count(nodes))
    settings: dict[str, Any] = {}
    if _count(ranks):
        settings["hardware.devices_per_node"] = _count(ranks)
    if _count(nodes) and (settings or _count(nodes) > 1):
        settings["hardware.nodes"] = _count(nodes)
    if around.get("srun") and _count(nodes) > 1:
        settings["launcher"] = "slurm"
    elif taken.launcher == "deepspeed" and isinstance(launch.get("hostfile"), str):
        settings |= {"launcher": "ssh", "launcher.hostfile": launch["hostfile"]}
    elif _count(nodes) > 1:
        settings["launcher"] = "ssh"
    return settings


def _count(value: Any) -> int:
    """Return a number of nodes or ranks; 0 if it is not known here."""
    return int(value) if re.fullmatch(r"[1-9]\d{0,5}", str(value)) else 0


OF_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "deepspeed_config_file",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "zero3_init_flag",
    "zero3_save_16bit_model",
)
"""Options of `accelerate launch` that its configuration has in the section of DeepSpeed."""
KINDS = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}


def _accelerate(launch: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `accelerate launch` as its configuration has them."""
    document: dict[str, Any] = {}
    for name, value in launch.items():
        if name in KINDS:
            document["distributed_type"] = KINDS[name]
        elif name in OF_DEEPSPEED:
            document.setdefault("deepspeed_config", {})[name] = value
        elif name.startswith("fsdp_"):
            document.setdefault("fsdp_config", {})[name] = value
        elif name == "cpu":
            document["use_cpu"] = True
        elif name not in ("config_file", "m", "module", "no_python", "quiet"):
            document[name] = value
    return document
