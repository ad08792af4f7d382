"""Work on checkpoints of other trainers, in one process: `python -m trainctl.migration TASK ...`.

The command line, which loads no torch, starts it; it is called and answers as
`trainctl.train.offline` is and does.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.train.offline import answer

if TYPE_CHECKING:
    from trainctl.runs.records import Progress


def _import(
    directory: str,
    run_dir: str,
    plan: str,
    argv: list[str],
    format: str | None,
    *,
    progress: Progress,
) -> dict[str, Any]:
    # Slow imports.
    from trainctl.data.user_functions import make_importable
    from trainctl.engines.patch_checks import require_definitions
    from trainctl.engines.patches import ProcessKind
    from trainctl.migration.checkpoints.source import open_source
    from trainctl.migration.checkpoints.write import import_source
    from trainctl.runs.directory import read_plan

    made_plan = read_plan(Path(plan))
    require_definitions(made_plan.config, {ProcessKind.model})
    if made_plan.config.model.factory is not None:
        make_importable(Path.cwd())
    made = import_source(
        open_source(Path(directory), format),
        made_plan,
        Path(run_dir),
        argv=argv,
        progress=partial(progress, "importing"),
    )
    return asdict(made)


if __name__ == "__main__":
    sys.exit(answer({"import": _import}))
