"""Import every configuration of a folder, and count what becomes of its keys.

    python scripts/check_config_imports.py TOOL FOLDER [--unknown] [--lacking]

FOLDER has the example configurations that a project ships. A file of no known program, or of
another one than TOOL, is counted apart. `--unknown` lists the unknown keys, `--lacking` what the
results lack before they validate. The exit code is 1 if a key is unknown.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from trainctl.errors import TrainctlError
from trainctl.migration.configs.import_file import import_file
from trainctl.migration.configs.result import ImportResult, Why

ENDINGS = (".yaml", ".yml", ".json", ".toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unknown", action="store_true", help="List the unknown keys.")
    parser.add_argument("--lacking", action="store_true", help="List what the results lack.")
    asked = parser.parse_args()
    files = sorted(path for path in asked.folder.rglob("*") if path.suffix in ENDINGS)
    results: list[ImportResult] = []
    others: Counter[str] = Counter()
    for file in files:
        try:
            result = import_file(file)
        except TrainctlError as error:
            others["of no known program" if "no program" in str(error) else str(error)] += 1
            continue
        if result.tool == asked.tool:
            results.append(result)
        else:
            others[f"of {result.tool}"] += 1
    keys = Counter(each.why.value for result in results for each in result.left_out)
    carried = sum(len(result.carried) for result in results)
    valid = sum(not result.missing for result in results)
    print("| tool | files | carried | listed | no effect | unknown | validate | lack something |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    counts = (len(results), carried, keys["left"], keys["ignored"], keys["unknown"], valid)
    print(f"| {asked.tool} | {' | '.join(map(str, counts))} | {len(results) - valid} |")
    for what, number in others.most_common():
        print(f"{number} files {what}")
    if asked.unknown:
        names = (x.key for result in results for x in result.left_out if x.why is Why.unknown)
        for name, number in Counter(names).most_common():
            print(f"unknown: {name} ({number})")
    if asked.lacking:
        lacking = (f"{x.rule} {x.key}: {x.message}" for result in results for x in result.missing)
        for text, number in Counter(lacking).most_common(40):
            print(f"lacks ({number}): {text}")
    return 1 if keys["unknown"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
