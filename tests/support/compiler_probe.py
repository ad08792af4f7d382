"""Runs inside a rank: whether the start has imported torch's compiler."""

import sys
from typing import Any

from trainctl.train.session import assemble


def is_imported(cases: list[Any], process: Any) -> bool:
    """Return True if building the engine, the last part of a start, imported the compiler."""
    (case,) = cases
    assemble(case.plan, case.run, process).engine.close()
    return "torch._inductor.compile_fx" in sys.modules
