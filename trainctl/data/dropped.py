"""Read back what was dropped from a corpus: counts, and examples with their texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainctl.data.quality.dropped_text import DroppedDocument, describe_examples
from trainctl.data.quality.selection import Example, example_of
from trainctl.data.selecting import DROPPED
from trainctl.data.store import lines_before, read_documents
from trainctl.data.tasks import Task
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.data import read_section, spec_of


def read_dropped(corpus: Path) -> dict[str, Any] | None:
    """Return the record of dropped documents of a corpus; None if it was built without rules.

    Raises:
        TrainctlError: The record cannot be read (exit code 5).
    """
    file = corpus / DROPPED
    try:
        plain: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrainctlError(
            f"{file} cannot be read: {error}",
            hint=f"remove {corpus}, and prepare it again: no text is read for that",
            exit_code=ExitCode.run_state,
        ) from None
    return plain


def examples_of(dropped: Mapping[str, Any]) -> Iterator[DroppedDocument]:
    """Yield the examples of a source. Each file is read once.

    Raises:
        TrainctlError: A file does not exist any more, or has changed.
    """
    examples = {
        reason: [example_of(each) for each in some] for reason, some in dropped["examples"].items()
    }
    texts = _texts(dropped, [each for some in examples.values() for each in some])
    return describe_examples(examples, lambda *document: texts[document])


def _texts(
    dropped: Mapping[str, Any], examples: list[Example]
) -> dict[tuple[str, str, int], tuple[str, str]]:
    """Return location and text of every document that the examples name."""
    wanted = {(each.source, each.part, each.number) for each in examples}
    wanted |= {each.like for each in examples if each.like is not None}
    found = {}
    for source, part, plain in dropped["parts"]:
        task, section = Task.from_plain(plain), read_section(dropped["sections"][source])
        numbers = {number for name, own, number in wanted if (name, own) == (source, part)}
        for number, (origin, text) in enumerate(read_documents(task, section)):
            if number in numbers:
                piece, line = task.pieces[origin.piece], origin.line
                if line and piece.start and spec_of(section).counts_lines:
                    line += lines_before(piece)
                where = f"{piece.file}:{line}" if line else str(piece.file)
                found[source, part, number] = where, text
    return found
