from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.runs.atomic import write_json, write_text


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    write_json(path, {"x": "ü", "y": [0.1]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"x": "ü", "y": [0.1]}
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_json_has_no_nan_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, [1])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, math.nan)
    assert path.read_text() == "[\n  1\n]\n"


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from trainctl.runs.atomic import write_text\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_text(Path(sys.argv[1]), 'new' * 1000)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert "OSError: [Errno 27]" in result.stderr
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
