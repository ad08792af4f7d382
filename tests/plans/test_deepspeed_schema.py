"""The committed schema is what the script derives from the installed DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from trainctl.rules.deepspeed_schema import load, versions

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_deepspeed_schema.py"


def test_the_schema_matches_the_installed_version():
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert version("deepspeed").partition("+")[0] in versions()


def test_every_key_lies_in_a_section_and_every_replacement_exists():
    keys = load().keys
    for name, key in keys.items():
        parent = name.rpartition(".")[0]
        assert not parent or keys[parent].is_section, name
        assert not key.same_as or key.same_as in keys
        for replacement in key.replaced.split(" or ") if key.replaced else ():
            assert replacement in keys, name


def test_defaults_are_legal_values_of_their_keys():
    from trainctl.rules.deepspeed.case import outside, read_value

    for key in load().keys.values():
        if key.default is not None and not key.is_section:
            assert not read_value(key, key.default).problem, key
            assert outside(key, read_value(key, key.default).value) is None, key


def test_removed_keys_are_not_keys():
    assert not set(load().removed) & set(load().keys)
