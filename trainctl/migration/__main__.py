"""Work on checkpoints of other trainers, in one process: `python -m trainctl.migration TASK ...`.

The command line, which loads no torch, starts it; it answers as `trainctl.train.offline` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainctl.train.offline import answer


def main() -> int:
    """Do the task; return the exit code."""
    return answer(partial(_run_task, _parser().parse_args()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainctl.migration")
    tasks = parser.add_subparsers(dest="task", required=True)
    imports = tasks.add_parser("import")
    imports.add_argument("directory", type=Path)
    imports.add_argument("run_dir", type=Path)
    imports.add_argument("plan", type=Path)
    imports.add_argument("argv", type=json.loads)
    imports.add_argument("--from", dest="format")
    return parser


def _run_task(
    arguments: argparse.Namespace, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    # Slow imports.
    from trainctl.data.user_functions import make_importable
    from trainctl.engines.patch_checks import require_definitions
    from trainctl.engines.patches import ProcessKind
    from trainctl.migration.checkpoints.source import open_source
    from trainctl.migration.checkpoints.write import import_source
    from trainctl.runs.directory import read_plan

    plan = read_plan(arguments.plan)
    require_definitions(plan.config, {ProcessKind.model})
    if plan.config.model.factory is not None:
        make_importable(Path.cwd())
    made = import_source(
        open_source(arguments.directory, arguments.format),
        plan,
        arguments.run_dir,
        argv=arguments.argv,
        progress=lambda done, total: progress("importing", done, total),
    )
    return asdict(made)


if __name__ == "__main__":
    sys.exit(main())
