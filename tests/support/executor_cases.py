"""A corpus with planted copies, prepared by any executor, and the bytes that come out."""

from __future__ import annotations

import io
import json
import random
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from trainctl.cli.main import run
from trainctl.config.compose import compose
from trainctl.data import tasks
from trainctl.data.corpora import build_corpora
from trainctl.data.tasks import OnPreparation
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.runs.records import ignore_progress

DOCUMENTS = 1500


def plant(folder: Path) -> None:
    """Write two sources: every fifth document is a copy of an earlier one, whole or nearly."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randrange(2, 9))) for _ in range(3000)]
    texts: list[str] = []
    for number in range(DOCUMENTS):
        text = draw.choices(words, k=draw.randrange(30, 120))
        if number % 5 == 4:
            text = draw.choice(texts).split()
            if number % 2:
                text[draw.randrange(len(text))] = "changed"
        texts.append(" ".join(text))
    folder.mkdir()
    for name, some in (("one", texts[::2]), ("two", texts[1::2])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (folder / f"{name}.jsonl").write_text(lines)


def prepare(
    monkeypatch: pytest.MonkeyPatch,
    texts: Path,
    cache: Path,
    *overrides: str,
    workers: int | None = None,
    progress: OnPreparation = ignore_progress,
) -> dict[str, bytes]:
    """Prepare the corpus in about 20 tasks, and return the files of the cache."""
    monkeypatch.setattr(tasks, "TASK_BYTES", 50_000)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(cache))
    config = compose([*settings(texts), *overrides]).config
    build_corpora(config, ByteTokenizer(), progress, workers=workers)
    return contents(cache)


def settings(texts: Path) -> list[str]:
    """Return the overrides of a configuration with the two sources."""
    filters = "filters: {gopher_quality: {min_words: 35, min_stop_words: null}}"
    sources = ", ".join(
        f"{name}: {{paths: [{texts}/{name}.jsonl], weight: 1, {filters}}}"
        for name in ("one", "two")
    )
    return [
        *("recipe=tiny", f"data.sources={{{sources}}}", "data.dedup=minhash"),
        *("data.decontaminate=[held_out]", "data.sort_bytes=1048576"),
    ]


def statistics(texts: Path, *overrides: str) -> dict[str, Any]:
    """Return what `data stats` prints of the corpora in the cache."""
    command = ["data", "stats", *settings(texts), *overrides, "--json"]
    shown = io.StringIO()
    with redirect_stdout(shown):
        assert run(command) == 0
    found: dict[str, Any] = json.loads(shown.getvalue())
    return found


def contents(cache: Path) -> dict[str, bytes]:
    """Return the files of a cache, without locks, with the cache's own path left out of them."""
    return {
        str(path.relative_to(cache)): path.read_bytes().replace(str(cache).encode(), b"CACHE")
        for path in sorted(cache.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }
