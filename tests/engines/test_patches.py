"""Tests that our assumptions about other packages hold, and that nothing runs where they do not.

One definition each of DeepSpeed, transformers and torch gets another signature: in the processes
of the command, of the node agent that every launcher starts, and of a rank.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from changed_packages import change
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.config.codec import to_plain
from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.engines import patch_checks as declared
from trainctl.engines import patches
from trainctl.engines.patches import ProcessKind, Table, Use, called, compare_with_installed
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.runs.command import AttemptCommand, NodeCommand, write_command
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.models.inspection_entry import _answer_request

ALL = [(table, use) for table in declared.TABLES for use in table.uses]
CHANGED = {
    "deepspeed.runtime.zero.stage_1_and_2": (
        "def _wait_for_offload_copies(self):",
        "def _wait_for_offload_copies(self, device=None):",
    ),
    "transformers.configuration_utils": (
        "def _attn_implementation(self, value: str | dict | None):",
        "def _attn_implementation(self, value: str | dict | None, recurse=True):",
    ),
    "torch.nn.modules.module": (
        "def register_parameter(self, name: str, param: Parameter | None) -> None:",
        "def register_parameter(self, name: str, param: Parameter | None, *, tied=False) -> None:",
    ),
}
SAID = (
    "DeepSpeedZeroOptimizer._wait_for_offload_copies of deepspeed 0.19.8 takes "
    "(self, device=None), not (self)",
    "_attn_implementation of transformers 5.23.0 takes (self, value, recurse=True), not "
    "(self, value)",
    "Module.register_parameter of torch 2.13.0",
)


@pytest.mark.parametrize(("table", "use"), ALL, ids=[use.name for _, use in ALL])
def test_what_is_known_holds_for_what_is_installed(table: Table, use: Use) -> None:
    assert [bool(use.signature), bool(use.body), bool(use.contains)].count(True) == 1
    assert use.target.startswith(f"{table.package}.")
    assert use.why and not use.why.endswith(".")
    assert not use.upstream or use.upstream.startswith("https://github.com/")
    if table.is_installed:
        assert compare_with_installed(use) == ""


def test_the_installed_versions_have_been_read() -> None:
    for table in declared.TABLES:
        if table.version is not None:
            assert table.version.partition("+")[0] in table.read_in


def test_only_what_a_run_needs_can_stop_it() -> None:
    config = RunConfig()
    needed = {use.name for _, use in ALL if use.is_needed(config)}
    assert not any("zenflow" in name or "pipe.engine" in name for name in needed)
    config.offload.zenflow = True
    more = {use.name for _, use in ALL if use.is_needed(config)} - needed
    assert more and all("zenflow" in name or "_update_model_bit16" in name for name in more)
    config.script = "train.py"
    assert {use.at for _, use in ALL if use.is_needed(config)} <= {ProcessKind.trace}


def test_changes_to_the_process_match_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(declared, "resolve_name", lambda name: lambda: called.append(name))
    config = RunConfig()
    declared.apply_patches(config)
    always = ["disable_shm_allreduce", "leave_muon_uncompiled"]
    assert [name.partition(":")[2] for name in called] == always
    config.offload.parameters = OffloadDevice.nvme
    declared.apply_patches(config)
    assert called[-1].endswith("copy_from_swap_buffers")


@pytest.mark.slow
def test_a_rank_that_compiles_nothing_starts_without_the_compiler(tmp_path: Path) -> None:
    case = Case(tiny_plan(tiny_config(steps=1), 1), RunPaths(tmp_path))
    assert train_cases(1, [case], probe="compiler_probe:is_imported") == [False]


PLAIN = '''
class Outer:
    """A class."""
    size: int = 3  # of it

    @property
    def of(self, a, /, b: int = 1, *rest, c="x", **more) -> str:
        """Words."""
        # A comment.
        return f"{a}"

def late(a,
         b):
    text = """
not the end
"""
    return text
'''
OTHERWISE = PLAIN.replace('"""Words."""', '"""Other words,\n\nand more."""').replace(
    "        # A comment.\n", "\n\n"
)


def _module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise ImportError('it was imported')")
    (folder / name / "code.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return f"{name}.code"


def test_definitions_are_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module(tmp_path, monkeypatch, "first_package", PLAIN)
    method = patches.find_definition(f"{module}:Outer.of")
    assert method is not None
    digest = patches.definition_digest(method)
    assert patches.definition_signature(method) == "(self, a, /, b=1, *rest, c='x', **more)"
    size = patches.find_definition(f"{module}:Outer.size")
    assert size is not None and ast.unparse(size) == "size: int = 3"
    late = patches.find_definition(f"{module}:late")
    assert late is not None and "not the end" in ast.unparse(late)
    assert patches.find_definition(f"{module}:Outer.late") is None
    assert patches.find_definition("no_such_package.code:late") is None

    layout = _module(tmp_path, monkeypatch, "second_package", OTHERWISE)
    same = patches.find_definition(f"{layout}:Outer.of")
    assert same is not None and patches.definition_digest(same) == digest
    other = _module(tmp_path, monkeypatch, "third_package", PLAIN.replace('f"{a}"', 'f"{b}"'))
    changed = patches.find_definition(f"{other}:Outer.of")
    assert changed is not None and patches.definition_digest(changed) != digest


def test_a_fallback_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module(tmp_path, monkeypatch, "fourth_package", PLAIN)

    def findings(fallback: str) -> list[Severity]:
        use = called(f"{module}:late(a)", "to try", fallback=fallback)
        found = Table("fourth_package", ("1.0",), (use,)).differences(
            RunConfig(), {ProcessKind.rank}
        )
        assert "fourth_package.code.late of fourth_package" in found[0].message
        return [finding.severity for finding in found]

    assert findings("") == [Severity.error]
    assert findings("it is done slowly") == [Severity.warning]


def test_what_other_code_has_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    declared.require_original_definitions(RunConfig())
    monkeypatch.setattr(DeepSpeedZeroOptimizer, "_wait_for_offload_copies", lambda self: None)
    with pytest.raises(TrainctlError) as raised:
        declared.require_original_definitions(RunConfig())
    assert raised.value.exit_code is ExitCode.environment
    assert f"is replaced in this process, by {__file__}" in raised.value.message


def test_a_trace_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    looked: list[set[ProcessKind]] = []

    def differences(_: RunConfig, at: set[ProcessKind]) -> list[Finding]:
        looked.append(at)
        return [Finding(rule="TC305", message="it", hint="that", exit_code=ExitCode.environment)]

    monkeypatch.setattr(declared, "check_needed_definitions", differences)
    monkeypatch.setattr("logging.disable", lambda level: None)
    asked = {"question": "trace", "config": to_plain(config), "folder": str(tmp_path)}
    (error,) = _answer_request(asked)["errors"]
    assert (error["message"], error["hint"]) == ("it", "that")
    assert error["exit_code"] == ExitCode.environment
    assert looked == [{ProcessKind.trace}]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the three packages, each with one definition of another signature."""
    folder = tmp_path_factory.mktemp("changed")
    for module, (old, new) in CHANGED.items():
        change(folder, module, old, new)
    return folder


def _done(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_doctor_and_launch_name_what_has_changed(changed: Path, tmp_path: Path) -> None:
    done = _done("-m", "trainctl", "doctor", "tiny", cwd=tmp_path, path=changed)
    assert done.returncode == ExitCode.environment, done.stderr
    assert done.stderr.count("error[TC305]") == len(SAID)
    for words in SAID:
        assert words in done.stderr
    assert "hint: pip install 'deepspeed==0.19.8'" in done.stderr
    assert (
        "  error       replaced  torch.nn.modules.module.Module.register_parameter" in done.stdout
    )
    done = _done(
        "-m", "trainctl", "launch", "recipe=tiny", "--run-dir", "run", cwd=tmp_path, path=changed
    )
    assert done.returncode == ExitCode.environment, done.stderr
    for words in SAID:
        assert words in done.stderr
    assert not (tmp_path / "run").exists()


def _prepared(folder: Path) -> RunPaths:
    """Create a run whose first attempt is about to start, as launchers leave it to their agents."""
    plan = tiny_plan(tiny_config(steps=2), 1)
    run = create_run(plan.config, run_dir=folder / "run")
    attempt = new_attempt(run, plan)
    ranks = (sys.executable, "-c", "print('a rank has started')")
    node = NodeCommand(node=0, host="here", argv=(), environment={})
    write_command(
        attempt, AttemptCommand(nodes=(node,), ranks_per_node=1, rank_command=ranks, port=None)
    )
    return run


def test_an_agent_starts_no_rank(changed: Path, tmp_path: Path) -> None:
    run = _prepared(tmp_path)
    agent = ("-m", "trainctl.launchers.agent", str(run.root), "--attempt", "1", "--node", "0")
    done = _done(*agent, cwd=tmp_path, path=changed)
    assert done.returncode == ExitCode.environment, done.stderr
    (failure,) = [event for event in read_events(run.events) if event["event"] == "failure"]
    assert failure["launch_exit_code"] == ExitCode.environment
    for words in SAID:
        assert words in failure["message"]
    assert not run.attempt(1).rank_log(0).exists()


@pytest.mark.slow
def test_a_rank_does_not_train_with_what_other_code_has_replaced(tmp_path: Path) -> None:
    run = _prepared(tmp_path)
    start = (
        "import torch.nn.modules.module as module\n"
        "module.Module.register_parameter = lambda self, name, param, tied: None\n"
        "from trainctl.train.__main__ import main\n"
        "raise SystemExit(main())"
    )
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", start, str(run.root), "--attempt", "1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == ExitCode.environment, done.stderr
    assert "torch.nn.modules.module.Module.register_parameter of torch" in done.stderr
    assert "is replaced in this process, by" in done.stderr
    assert json.loads(run.attempt(1).plan.read_text())["total_steps"] == 2
