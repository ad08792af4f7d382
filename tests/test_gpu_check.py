"""`scripts/gpu_check.py` measures what a GPU changes, and runs through where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.memory.budget import budget
from trainctl.rules.resolve import resolve

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
sys.path.append(str(SCRIPTS))  # behind what else has these names

from benchmarks.isolation import run_isolated  # noqa: E402
from gpu_cases import CEILINGS, MEMORY, SPEED, TRAINCTL, Case, Steps, overrides  # noqa: E402
from gpu_page import render, tokens_per_second  # noqa: E402

BOTH = {"adam": "adamw's update", "sgd": "less than adamw", "nvme-optimizer": "nvme swaps it, too"}
"""Options that no case needs: another has the same kernels and memory."""

ONLY_ON_GPUS = "B bare masked, variable length"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=550,
    )


def in_python(code: str) -> str:
    """Run code as a script of the folder would be, in a process that pytest does not share."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "case",
    [case for case in (*SPEED, *MEMORY) if case.loop == TRAINCTL],
    ids=lambda case: case.name,
)
def test_a_case_fits_its_device(case: Case, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    words = overrides(case, folder=tmp_path, on_gpu=True)
    config = compose([*words, f"hardware={case.device}"]).config
    found = resolve(config, resolve_hardware(config.hardware))
    assert found.plan is not None, found.findings
    assert budget(found.plan).fits is not False
    assert found.plan.total_steps == case.steps.total


def test_every_option_that_a_gpu_computes_otherwise_is_measured() -> None:
    chosen = {word for case in MEMORY for word in case.options}
    for group in ("optimizer", "precision", "kernels", "offload", "activation_checkpointing"):
        options = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        lacking = {name for name in options if f"{group}={name}" not in chosen} - set(BOTH)
        assert lacking <= {"none", "default", "plain", "adamw", "bf16"}, (group, lacking)


def test_the_profiled_steps_follow_one_that_starts_the_profiler() -> None:
    steps = Steps(warm=5, timed=8, profiled=2)
    assert steps.total == 16 and steps.window == (15, 16)
    assert Steps(warm=2, timed=4, profiled=0).total == 6


def test_a_case_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def hang() -> None:
        child = subprocess.Popen(["sleep", "600"])
        pids.write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)

    began = time.monotonic()
    assert run_isolated(hang, limit=2, log=tmp_path / "log") == "not done after 2 s"
    assert time.monotonic() - began < 60
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_case_that_fails_leaves_a_short_cause(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no such thing " + "x" * 500)

    cause = run_isolated(fail, limit=60, log=tmp_path / "log")
    assert cause.startswith("ValueError: no such thing") and len(cause) == 200
    assert run_isolated(lambda: None, limit=60, log=tmp_path / "log") == ""
    killed = run_isolated(lambda: os.kill(os.getpid(), 9), limit=60, log=tmp_path / "log")
    assert killed == "ended with -9 and no error in its output"


@pytest.mark.slow
def test_both_calls_run_through_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "pages"
    done = check("--call", "1", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "cpu-small.jsonl").read_text().splitlines()]
    results = {line["name"]: line for line in lines}
    cases = [case for case in SPEED if case.shape != "B" or "masked" in case.name]
    assert list(results) == [case.name for case in cases]
    for name, result in results.items():
        if name == ONLY_ON_GPUS:
            assert "_flash_attention_forward" in result["problem"]
        elif name != CEILINGS:
            assert result["problem"] == "", (name, result["problem"])
            assert len(result["seconds"]) == 2 and result["peak_bytes"] > 2**26
            assert result["profile"]["attention"] == ["sdpa flash"] or "masked" in name
            assert result["profile"]["classes"]["products"] > 0
            assert len(result["profile"]["top"]) == 12 and len(result["profile"]["gaps"]) == 5
    assert all(value > 0 for value in results[CEILINGS]["ceilings"].values())
    page = (out / "cpu-small.md").read_text()
    assert "No GPU here" in page and page.count("## Profile: ") == len(results) - 2

    # The second call continues: tests of a file, then the fastest case with another option.
    again = check("--call", "2", "--out", str(out), "optimizer.lr=0.001")
    assert again.returncode == 0, again.stdout + again.stderr
    lines = [json.loads(line) for line in (out / "cpu-small.jsonl").read_text().splitlines()]
    *_, tests, fastest = lines
    assert tests["skipped"] > 0 and not tests["failed"] and len(tests["files"]) == 1
    assert fastest["name"] == "A fastest again" and fastest["options"][-1] == "optimizer.lr=0.001"
    assert fastest["problem"] == "" and fastest["seconds"]

    # A call goes on with what is missing, if there is time.
    kept = [json.dumps(line) for line in lines if line["name"] != "A ZeRO 0"]
    (out / "cpu-small.jsonl").write_text("\n".join(kept) + "\n")
    late = check("--call", "1", "--minutes", "0", "--out", str(out))
    assert "A ZeRO 1: measured on" in late.stderr
    assert "A ZeRO 0: not begun, the time is over" in late.stderr


@pytest.mark.slow
def test_a_case_can_run_in_a_process_that_imports_anew(tmp_path: Path) -> None:
    printed = in_python(
        f"""
import time
from pathlib import Path
from gpu_call import Check
from gpu_cases import SPEED, Case
check = Check(device=None, began=time.monotonic(), minutes=5, out=Path({str(tmp_path)!r}),
              is_again=False)
check._forks = False
check.measure(SPEED[0])
check.measure(Case(name="A wrong", options=("zero_stage=7",)))
"""
    )
    assert "ceilings: done" in printed and "A wrong: " in printed
    ceilings, wrong = map(json.loads, (tmp_path / "cpu-small.jsonl").read_text().splitlines())
    assert ceilings["ceilings"]["tflops"] > 0 and "no option '7'" in wrong["problem"]
    assert f"| A wrong | {wrong['problem']} |" in (tmp_path / "cpu-small.md").read_text()


@pytest.mark.slow
def test_tests_that_failed_before_and_changed_files_run(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    mark = "import pytest, time\npytestmark = pytest.mark.gpu\n"
    (folder / "test_known.py").write_text(
        mark + "def test_failing():\n    assert 1 == 2, 'still'\ndef test_good(): pass\n"
    )
    (folder / "test_new.py").write_text(mark + "def test_new(): pass\n")
    (folder / "test_hanging.py").write_text(
        mark + "def test_quick(): pass\ndef test_slow(): time.sleep(600)\n"
    )
    (folder / "test_other.py").write_text("def test_other(): assert False\n")
    printed = in_python(
        f"""
import json
from pathlib import Path
from gpu_tests import _hash, run_tests
root = Path({str(tmp_path)!r})
known = "tests/test_known.py"
failing, gone = known + "::test_failing", "tests/test_gone.py::test_gone"
former = {{"files": {{known: _hash(root / known)}}, "failed": [failing, gone]}}
first = run_tests(root, former, [failing, gone], limit=20, is_small=False)
late = run_tests(root, former, [failing], limit=0, is_small=False)
print(json.dumps([first, late]))
"""
    )
    result, none = json.loads(printed.splitlines()[-1])
    assert none["failed"] == result["failed"] and none["passed"] == 0  # not run, so still failed
    assert result["failed"] == ["tests/test_known.py::test_failing"]
    assert "still" in result["tracebacks"]["tests/test_known.py::test_failing"]
    # The hanging file comes before the new one, and its deadline is that of all tests.
    assert result["passed"] == 1 and result["skipped"] == 0
    hanging, late = result["unfinished"]
    assert re.fullmatch(r"tests/test_hanging.py: not done after \d+ s", hanging)
    assert late == "tests/test_new.py: not begun, the time is over"
    assert list(result["files"]) == ["tests/test_known.py"]


def test_the_page_has_percentiles_and_the_share_of_the_fastest() -> None:
    head = {"loop": TRAINCTL, "problem": "", "date": "2026-11-28", "versions": {"torch": "2.11"}}
    sizes = {"planned_bytes": 2**31, "planned_low_bytes": 2**30, "planned_high_bytes": 2**32}
    quick = {
        "name": "A ZeRO 1",
        "tokens_per_step": 1000,
        "flops_per_step": 1e14,
        "peak_tflops": 1000.0,
        "predicted_seconds": 0.5,
        "seconds": [1.0, 1.1, 0.9, 1.0, 2.0],
        "peak_bytes": 2**30,
        **sizes,
        **head,
    }
    peer = {**quick, "name": "A other", "loop": "torchtitan", "seconds": [0.5]}
    speed = tokens_per_second(quick)
    assert speed == pytest.approx((1000, 1000 / 1.64, 1000 / 0.94))
    assert tokens_per_second({"name": "A failed"}) is None
    page = render({"A ZeRO 1": quick, "A other": peer}, device="NVIDIA H200", on_gpu=True)
    assert "| A ZeRO 1 | 1,000 | 610 to 1,064 | 2,000 | 10.0% | 0.50 |" in page
    assert "| A other | 2,000 | 2,000 to 2,000 |  | 20.0% | 1.00 |" in page
    assert "No GPU here" not in page


def test_wrong_arguments_are_reported() -> None:
    done = check("--call", "3")
    assert done.returncode == 2
    assert "invalid choice: '3'" in done.stderr
