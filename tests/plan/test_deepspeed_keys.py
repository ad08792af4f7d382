"""The closed lists of keys are those of the installed DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.plan.deepspeed_keys import (
    OWNED_KEYS,
    REMOVED_TOP_LEVEL_KEYS,
    REMOVED_ZERO_KEYS,
    TOP_LEVEL_KEYS,
    ZERO_KEYS,
)

READ_KEYS = """
import json, sys
sys.stdout, out = sys.stderr, sys.stdout
import deepspeed
from deepspeed.runtime import config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
zero = {
    field.alias or name
    for name, field in DeepSpeedZeroConfig.model_fields.items()
    if not (field.json_schema_extra or {}).get("deprecated")
}
facts = {
    "folder": deepspeed.__path__[0],
    "zero": sorted(zero),
    "removed": sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
    "removed_zero": sorted(config._REMOVED_ZERO_CONFIG_KEYS),
}
json.dump(facts, out)
"""


@pytest.fixture(scope="module")
def installed():
    done = subprocess.run(
        [sys.executable, "-c", READ_KEYS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_keys_of_zero_optimization(installed):
    assert set(installed["zero"]) == ZERO_KEYS


def test_the_removed_keys(installed):
    assert set(installed["removed"]) == REMOVED_TOP_LEVEL_KEYS
    assert set(installed["removed_zero"]) == REMOVED_ZERO_KEYS


def test_every_top_level_key_stands_in_deepspeed_s_source(installed):
    folders = ("runtime", "comm", "monitor", "profiling", "autotuning", "utils", "datastates")
    root = Path(installed["folder"])
    files = [root / "__init__.py", *(f for name in folders for f in (root / name).rglob("*.py"))]
    source = "\n".join(file.read_text() for file in files)
    missing = [k for k in TOP_LEVEL_KEYS if f'"{k}"' not in source and f"'{k}'" not in source]
    assert not missing


def test_the_lists_do_not_overlap():
    assert not TOP_LEVEL_KEYS & REMOVED_TOP_LEVEL_KEYS
    assert set(OWNED_KEYS) <= TOP_LEVEL_KEYS
