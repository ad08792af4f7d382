"""Runs inside a rank: whether its start has imported torch's compiler."""

import sys
from typing import Any

from trainctl.train.session import assemble


def is_imported(cases: list[Any], process: Any) -> bool:
    """After the engine was built, which is the last that a start imports for."""
    (case,) = cases
    assemble(case.plan, case.run, process).engine.close()
    return "torch._inductor.compile_fx" in sys.modules
