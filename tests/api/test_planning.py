"""Planning from Python: the printed examples, errors, changes, search, threads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import new_run

import trainctl as tc
from trainctl import api
from trainctl.config.overrides import expand_sweep
from trainctl.errors import ExitCode
from trainctl.examples.parts import write_part
from trainctl.launchers.planning import compose_config, plan_config
from trainctl.runs.sweeps import new_sweep

ROOT = Path(__file__).parents[2]
HARDWARE = "8xh100-80g"


@pytest.fixture(scope="module")
def plan() -> tc.Plan:
    return tc.plan("7b-zero3", "optimizer.lr=2e-4", hardware=HARDWARE)


def run_python(script: str, folder: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_loads_nothing() -> None:
    script = (
        "import sys; before = set(sys.modules); import trainctl\n"
        "print(*set(sys.modules) - before)\n"
        "assert trainctl.api.plan\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
        "print(*(name for name in sys.modules if name.startswith('trainctl.')))"
    )
    new, packages, own = run_python(script).splitlines()
    assert [name for name in new.split() if name.startswith("trainctl")] == ["trainctl"]
    assert not {"torch", "hydra", "omegaconf", "typer", "rich", "numpy", "yaml"} & set(
        packages.split()
    )
    assert set(own.split()) == {"trainctl.api", "trainctl.errors"}


def test_the_printed_example_plans_without_torch() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    (example,) = re.findall(r"<!-- planning -->\n```python\n(.*?)```", page, re.DOTALL)
    loaded = run_python(f"{example}\nimport sys; print(*sys.modules)").split()
    assert not {"torch", "deepspeed", "transformers", "typer", "rich"} & set(loaded)


def test_a_plan_says_what_the_commands_say(plan: tc.Plan) -> None:
    assert plan.fits is True
    assert {each.rule for each in plan.findings} == {"TC410", "TC411"}
    assert plan.deepspeed_json["zero_optimization"]["stage"] == 3
    assert plan.config["optimizer"]["lr"] == 2e-4
    assert plan.overrides == ("recipe=7b-zero3", "optimizer.lr=2e-4", f"hardware={HARDWARE}")
    assert plan.commands()[0][1:4] == ["-P", "-m", "trainctl.launchers.agent"]
    assert "train_batch_size = 1024" in plan.explain("train_batch_size").lines()
    assert json.dumps(plan.to_dict())
    assert "Plan of 7b-zero3" in repr(plan)
    plan.deepspeed_json.clear()
    assert plan.deepspeed_json, "a copy was given"
    with pytest.raises(AttributeError):
        plan.findings = ()  # type: ignore[misc]


def test_memory_by_device_host_and_disk(plan: tc.Plan) -> None:
    memory = plan.memory
    assert 0 < memory.device.low < memory.device.peak < memory.device.high
    assert memory.device.capacity is not None and memory.device.peak < memory.device.capacity
    frame = memory.to_frame()
    assert frame[memory.device.peak_phase].sum() == memory.device.peak
    assert dict(frame.sum()) == memory.device.phases
    assert memory.host.peak == sum(memory.host.components.values())
    assert memory.disk.checkpoints >= memory.disk.checkpoint > 0
    assert memory.nvme.peak == 0
    assert "peak, at" in repr(memory)


def test_changes_by_key(plan: tc.Plan) -> None:
    changed = plan.with_("zero_stage=2", "optimizer.lr=3e-4")
    assert not [each for each in changed.findings if each.rule == "TC111"], "given once, not twice"
    changes = {each.key: (each.before, each.after) for each in changed.diff(plan)}
    assert changes["zero_stage.stage"] == (3, 2)
    assert changes["optimizer.lr"] == (2e-4, 3e-4)
    assert "zero_stage.stage: 3 -> 2" in repr(changed.diff(plan))
    assert repr(plan.diff(plan)) == "no change"


def test_a_plan_that_does_not_fit_is_returned_with_what_would_fit() -> None:
    plan = tc.plan("7b-zero3", "zero_stage=0", hardware="8xa100-40g")
    assert plan.fits is False
    assert [each.exit_code for each in plan.findings if each.is_error] == [ExitCode.does_not_fit]
    suggestion = plan.suggestions()[0]
    assert plan.with_(*suggestion.overrides).fits


def test_mistakes_raise_with_every_finding(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(tc.TrainctlError) as raised:
        tc.plan("7b-zero3", "optimizer.lrr=1", "training.stepz=3")
    assert [each.key for each in raised.value.findings] == ["optimizer.lrr", "training.stepz"]
    assert "did you mean optimizer.lr" in str(raised.value)
    with pytest.raises(tc.TrainctlError, match="no recipe and no model 'lama-8b'") as unknown:
        tc.search("lama-8b", hardware=HARDWARE)
    assert "llama-8b" in unknown.value.hint
    assert capfd.readouterr() == ("", "")


def test_a_search_ranks_plans() -> None:
    words = ("training.tokens=1B", "training.sequence_length=2048")
    found = tc.search("llama-8b", *words, hardware=HARDWARE, top=3)
    assert len(found) == 3
    assert "training.global_batch_tokens=4M" in found.overrides
    rates = [each.tokens_per_second for each in found]
    assert rates == sorted(rates, reverse=True)
    plan = found[0].plan
    assert plan.fits and plan.memory.device.peak == found[0].memory.device.peak
    frame = found.to_frame()
    assert list(frame["device_peak_bytes"]) == [each.memory.device.peak for each in found]
    assert "tokens/s a device" in repr(found[1:][0])


def test_html_is_escaped(plan: tc.Plan) -> None:
    shown = plan.with_("model.name='<script>alert(1)</script>'")
    for each in (shown, shown.memory, shown.diff(plan)):
        assert "<script" not in each._repr_html_()
    assert "&lt;script" in shown._repr_html_() and "<svg" in shown._repr_html_()


def test_the_other_checks(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "zero_optimizationn": {}}')
    checked = api.check_deepspeed(file, world_size=2)
    assert checked.has_error and "zero_optimizationn" in checked.findings[0].message
    assert {"packages", "torch"} <= {each.name for each in api.check_machine("tiny").checks}
    assert "tiny" in {each["name"] for each in api.list_recipes()}


def test_a_run_is_planned_and_searched_by_its_path(tmp_path: Path) -> None:
    path = new_run(tmp_path / "lr=1", "model.num_layers=3").root
    arguments: list[str] = [path, "training.global_batch_tokens=1M"]  # type: ignore[list-item]
    found = tc.search(*arguments, hardware=HARDWARE)[0].plan
    for plan in (tc.Run(path).plan, tc.Run(path).plan.with_("training.steps=7"), found):
        assert plan.config["model"]["num_layers"] == 3


def test_a_missing_length_is_not_blamed_beside_a_stray_word() -> None:
    for overrides, hint in (((), "recipe=tiny"), (["tiny"], "write recipe=tiny")):
        with pytest.raises(tc.TrainctlError) as raised:
            plan_config(compose_config(overrides, None)).plan  # noqa: B018
        (finding,) = raised.value.findings
        assert hint in finding.hint


def test_options_that_come_too_late_are_refused(tmp_path: Path) -> None:
    write_part("optimizer", "mine", tmp_path / "own")
    script = (
        "import os; os.environ['TRAINCTL_TRUST_CODE'] = '1'\n"
        "import sys, trainctl as tc\n"
        "if 'late' in sys.argv: tc.plan('tiny')\n"
        "try: print(tc.plan('tiny', 'optimizer=mine', config_dir='own').config['optimizer'])\n"
        "except tc.TrainctlError as error: print(error, error.hint)\n"
    )
    assert "'kind': 'mine'" in run_python(script, tmp_path)
    assert "comes too late" in run_python(f"import sys; sys.argv += ['late']\n{script}", tmp_path)


def test_a_sweep_is_resumed_with_its_own_options(tmp_path: Path) -> None:
    write_part("optimizer", "mine", tmp_path / "own")
    swept = ("recipe=tiny", "optimizer=mine", "optimizer.lr=1e-3,1e-4")
    new_sweep(tmp_path / "sweep", swept, expand_sweep(swept), tmp_path / "own")
    script = (
        "import os; os.environ['TRAINCTL_TRUST_CODE'] = '1'\n"
        "import trainctl as tc\n"
        "from trainctl.launchers.sweep import SweepObserver\n"
        "class Watching(SweepObserver):\n"
        "    def planned(self, points): raise SystemExit(print('planned'))\n"
        "tc.sweep(sweep_dir='sweep', resume=True, observer=Watching())\n"
    )
    assert run_python(script, tmp_path) == "planned\n"


THREADS = """
import threading
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
import os
import trainctl as tc

os.environ |= {"MY_TOKEN": "text", "SEED": "7"}
CASES = [("tiny",), ("7b-zero3",), ("70b-3d",), ("7b-zero2", "zero_stage=1"), ("125m",),
         ("7b-zero3-nvme", "offload.nvme_path=/x"), ("tiny", "training.seed=${oc.env:SEED}")]
barrier, found = threading.Barrier(len(CASES)), {}

def work(index):
    barrier.wait()
    found[index] = tc.plan(*CASES[index]).to_dict()

threads = [threading.Thread(target=work, args=(i,)) for i in range(len(CASES))]
for each in threads: each.start()
for each in threads: each.join()
assert len(found) == len(CASES)
for index, case in enumerate(CASES):
    assert found[index] == tc.plan(*case).to_dict(), case
assert not GlobalHydra.instance().is_initialized()
assert OmegaConf.create({"a": "${oc.env:MY_TOKEN}"}).a == "text"
"""


def test_plans_in_threads_do_not_disturb_each_other() -> None:
    """In a fresh process, where nothing is cached yet."""
    run_python(THREADS)
