"""Adapters and frozen weights on every layout against one process, as a table in the docs.

    python scripts/parity_adapters.py [--steps N]

Trains a tiny model on real processes, in fp32: what trains, over layouts, ZeRO stages,
recomputation and an optimizer in host memory. What the plan refuses is a dash in the table.
`tests/train/test_adapters.py` does a part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from adapter_cases import Adapting, everything, judged, train
from fork_server import RanksFailed
from parity_cases import TOLERANCE, Curve, Difference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "adapters.md"
BEGIN, END = "<!-- parity of adapters -->", "<!-- end of it -->"
WAYS = (("none", "none"), ("full", "none"), ("none", "cpu"))
"""Columns: recomputation, and where the optimizer is."""


def measured(cases: list[Adapting], steps: int) -> dict[Adapting, Difference | None]:
    """How far each is from one process; None where the plan refuses it."""
    found: dict[Adapting, Difference | None] = {}
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def curve_of(case: Adapting) -> Curve:
            return train(case, Path(folder), steps=steps)

        for case in cases:
            if judged(case, steps)[0] is None:
                found[case] = None
                continue
            started = time.monotonic()
            try:
                found[case] = Difference.between(curve_of(case.reference), curve_of(case))
            except RanksFailed as failure:
                print(failure, file=sys.stderr)
                found[case] = Difference(float("inf"), float("inf"))
            print(f"{case}: {found[case]} in {time.monotonic() - started:.1f} s", flush=True)
    return found


def table(found: dict[Adapting, Difference | None], steps: int) -> Iterator[str]:
    """Lines of the page."""
    judged_cases = {case: each for case, each in found.items() if each is not None}
    limit = Difference(TOLERANCE, TOLERANCE)
    good = sum(each.within(limit) for each in judged_cases.values())
    yield (
        f"{steps} steps with torch {version('torch')}, deepspeed {version('deepspeed')}: "
        f"{len(judged_cases)} combinations, of which {good} agree."
    )
    yield ""
    yield "| trains | layout | ZeRO | plain | recomputed | optimizer in host memory |"
    yield "|---|---|---|---|---|---|"
    rows = dict.fromkeys((case.trained, case.layout, case.stage) for case in found)
    for trained, layout, stage in rows:
        cells = [
            _cell(found.get(Adapting(trained, layout, stage, recomputed, offload)))
            for recomputed, offload in WAYS
        ]
        if any(cell != "–" for cell in cells):
            yield f"| {trained} | {layout} | {stage} | {' | '.join(cells)} |"


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    largest = max(difference.loss, difference.norm)
    return f"{largest:.1e}" if largest <= TOLERANCE else f"**{largest:.1e}**"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    found = measured(everything(), steps)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(table(found, steps))}\n{END}{after}")
    limit = Difference(TOLERANCE, TOLERANCE)
    return 0 if all(each is None or each.within(limit) for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
