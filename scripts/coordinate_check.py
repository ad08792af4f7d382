"""Check that the size of activations is independent of the width with muP, and not without.

    python scripts/coordinate_check.py [--family gpt2] [--optimizer muon]

Trains models that differ only in width for a few steps with the real trainer, with and without muP.
Compares their activations on one batch of text: the mean absolute value at each place in the model,
and the mean absolute change since initialisation (arXiv:2203.03466, appendix D.1). The check passes
if no place grows or shrinks with the width. `tests/train/test_mup.py` runs it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from coordinates import check, table

from trainctl.config.registry import load_specs
from trainctl.options.model import families as known_families


def main() -> int:
    """Run the check with and without muP; the exit code is 1 if muP fails or plain training
    passes.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    families = [spec.name for spec in known_families()]
    parser.add_argument("--family", choices=families, default="llama")
    kinds = [spec.name for spec in load_specs("optimizer") if spec.width_rule is not None]
    parser.add_argument("--optimizer", choices=kinds, default="adamw")
    arguments = parser.parse_args()
    results = {}
    for mup in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            results[mup] = check(
                Path(folder),
                mup=mup,
                family=arguments.family,
                optimizer=arguments.optimizer,
            )
        print(f"{'with' if mup else 'without'} muP: flat is {results[mup].is_flat}")
        print(table(results[mup]))
    return int(not results[True].is_flat or results[False].is_flat)


if __name__ == "__main__":
    sys.exit(main())
