"""Loggers: each follows a run's records and sends their metrics (see `follower`).

As a script, `python -P trainctl/monitor/loggers/__init__.py RUN_DIR NAME ...`, it runs the package
with a Python in whose environment trainctl is not installed. Only trainctl becomes importable
there, not the other packages of trainctl's environment.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).parents[2]
    spec = spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules[folder.name] = module_from_spec(spec)
    spec.loader.exec_module(package)
    runpy.run_module("trainctl.monitor.loggers", run_name="__main__")
