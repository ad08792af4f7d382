"""Read published models with transformers' classes, and write the table that trainctl ships.

    python scripts/published_models.py

Each `config.json` of `tests/memory/published` becomes an entry of
`trainctl/config/published_models.json`: the shapes that identify a directory, the anatomy, and the
bytes that a block keeps. `tests/memory/test_published_models.py` traces the models again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from published_cases import CASES, composed, resaved, traced

from trainctl.models.tracing import FILE, shape_of

LENGTHS = (1024, 8192)


def main() -> None:
    """Write the file."""
    models = {name: entry(name) for name in CASES}
    content = {"transformers": version("transformers"), "models": models}
    lines = [f' "{name}": {json.dumps(each)}' for name, each in content["models"].items()]
    FILE.write_text(
        f'{{"transformers": "{content["transformers"]}", "models": {{\n'
        + ",\n".join(lines)
        + "\n}}\n",
        encoding="utf-8",
    )


def entry(name: str) -> dict[str, Any]:
    """Return the shipped entry of one model."""
    config = composed(name)
    short, long = (asdict(traced(config, length).block) for length in LENGTHS)
    block = {}
    for part, size in long.items():
        slope = round((size - short[part]) / (LENGTHS[1] - LENGTHS[0]), 1)
        slope = int(slope) if slope.is_integer() else slope
        block[part] = [round(size - slope * LENGTHS[1]), slope]
    return {
        "shapes": [shape_of(CASES[name]), shape_of(resaved(name))],
        "attention": config.model.attention.value,
        "anatomy": config.model.anatomy,
        "block": block,
    }


if __name__ == "__main__":
    main()
