"""The matrix of docs/coming-from.md has the cases that the script trains, and their numbers."""

import sys
from pathlib import Path

from migration_cases import CASES

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))  # behind what else has these names

from migration_matrix import MARKS, TOLERANCE, differences_of, render  # noqa: E402
from page_tables import read_rows  # noqa: E402

PAGE = ROOT / "docs" / "coming-from.md"


def test_the_page_has_every_case_and_no_other():
    rows = read_rows(PAGE.with_suffix(".csv"))
    found = differences_of(rows)
    assert list(found) == list(CASES)
    assert max(float(difference) for difference in found.values()) < TOLERANCE
    begin, end = MARKS
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(begin)[1].split(end)[0].strip() == render(rows)
