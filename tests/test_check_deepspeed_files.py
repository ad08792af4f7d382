"""`scripts/check_deepspeed_files.py`: each file of a folder, beside the real DeepSpeedConfig."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sampler import every_break

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_deepspeed_files.py"
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}
FILES = {
    "one/valid": {"train_batch_size": 16, **BATCH, "optimizer": ADAMW},
    "one/auto": {
        **dict.fromkeys(("train_batch_size", *BATCH, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    },
    "one/remark": {**BATCH, "comment": "for eight GPUs", "zero_optimization": {"stage": 1}},
    "two/silent": {**BATCH, "fp16": {"enabled": True}},
    "two/unknown": {**BATCH, "zero_optimization": {"stages": 2}},
    "two/later": {**BATCH, "optimizer": {"type": "OneBitAdam"}},
    "two/gpu": {**BATCH, "aio": {"use_gds": True}},
    "two/product": {"train_batch_size": 7, **BATCH},
}


def run(folder, *arguments):
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, done.stdout


def written(folder, files):
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def test_each_file_is_checked_imported_and_loaded(tmp_path):
    written(tmp_path, FILES)
    (tmp_path / "two" / "broken.json").write_text('{"train_batch_size": $SIZE}')
    code, text = run(tmp_path)
    assert code == 0, text
    told = dict(zip(*[iter(_by_file(text))] * 2, strict=True))
    assert told["one/valid.json (8 ranks)"].startswith("  checked: valid with TC263\n  imported: ")
    assert "left out: train_batch_size: nobody set it" in told["one/auto.json (1 rank)"]
    assert "checked: valid with TC263, TC433" in told["one/remark.json (1 rank)"]
    for name, what in {
        "silent": "explained: DeepSpeedConfig takes it: TC432 is accepted silently",
        "unknown": "DeepSpeedConfig: refuses it: ValidationError: 1 validation error",
        "later": "TC250 is refused when the engine is built (runtime/engine.py)",
        "gpu": "explained: the child has no GPU: TC290",
        "product": "TC221 train_batch_size: train_batch_size=7",
        "broken": "imported: refused: the check finds errors",
    }.items():
        assert what in told[f"two/{name}.json (1 rank)"], text
    *_, one, two, every = text.splitlines()
    assert [line.split() for line in (one, two, every)] == [
        [name, *map(str, counts)]
        for name, counts in {
            "one": (3, 3, 0, 3, 3, 3, 0, 0),
            "two": (6, 1, 5, 1, 1, 2, 3, 0),
            "all": (9, 4, 5, 4, 4, 5, 3, 0),
        }.items()
    ]


@pytest.mark.slow
def test_no_break_of_a_rule_is_unexplained(tmp_path):
    cases = [case for case in every_break(3) if not case.get("stages")][::2]
    files = {f"{n:03}-{case['breaks']}": case["json"] for n, case in enumerate(cases)}
    written(tmp_path, files)
    code, text = run(tmp_path, "--quiet")
    assert code == 0, text


def _by_file(text):
    """Return the lines alternately: one that names a file, then the text of its other lines."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  ") and "files" not in line:
            lines[-1] += f"{line}\n"
        elif ".json (" in line:
            lines += [line, ""]
    return lines
