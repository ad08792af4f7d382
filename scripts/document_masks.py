"""Measure which architectures keep packed documents apart, and write docs/models.md's table.

    python scripts/document_masks.py [--only gpt_oss,lfm2] [--check]

Each decoder of transformers is measured on a small model of its class's default configuration, as
the anatomy of a run's model is (`trainctl.train.models.documents`). `docs/documents.csv` has a row
for each, with the attentions by what keeps its documents apart.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainctl.train.models import documents
from trainctl.train.models.anatomy import block_kinds, supported_attentions

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, FILE = DOCS / "models.md", DOCS / "documents.csv"
BEGIN, END = "<!-- documents -->", "<!-- end of documents -->"
COLUMNS = ("model_type", "apart", "by_positions", "joined")

SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128},
}
"""Settings of published models where a class's defaults are of no model, or of one without the
layers that the architecture is for.
"""

Row = dict[str, str]


def main(words: list[str] | None = None) -> int:
    """Measure the selected architectures, keep the other rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="comma-separated architectures; others keep their rows")
    parser.add_argument("--check", action="store_true", help="check the page; write nothing")
    arguments = parser.parse_args(words)
    if not arguments.check:
        names = arguments.only.split(",") if arguments.only else decoders()
        found = {row["model_type"]: row for row in rows()} if arguments.only else {}
        for name in names:
            found[name] = measured(name)
            print(found[name], flush=True)
            write([found[each] for each in sorted(found)])
    text = PAGE.read_text(encoding="utf-8")
    wanted = with_table(text)
    if not arguments.check:
        PAGE.write_text(wanted, encoding="utf-8")
    return int(arguments.check and text != wanted)


def decoders() -> list[str]:
    """Return the decoders of transformers, without the halves of encoder-decoder models."""
    found = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with suppress(Exception):  # no model has its defaults
            if not CONFIG_MAPPING[name](**SETTINGS.get(name, {})).is_encoder_decoder:
                found.append(name)
    return found


def measured(name: str) -> Row:
    """Return the row of an architecture; without attentions if its defaults build no model."""
    logging.set_verbosity_error()
    row = dict.fromkeys(COLUMNS, "")
    with suppress(Exception):
        config = CONFIG_MAPPING[name](**SETTINGS.get(name, {}))
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        kinds, attentions = block_kinds(built), supported_attentions(type(built))
        blocks = max(kinds.index(kind) for kind in kinds) + 1
        joined = documents.joined_attentions(built, attentions, blocks)
        without = set(documents.joined_attentions(built, attentions, blocks, mends=False))
        for attention in attentions:
            column = "by_positions" if attention in without else "apart"
            column = "joined" if attention in joined else column
            row[column] = f"{row[column]} {attention}".strip()
    return {**row, "model_type": name}


def rows() -> list[Row]:
    """Return the rows of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(found: list[Row]) -> None:
    """Write the rows."""
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def with_table(text: str) -> str:
    """Return the page with the table between its marks replaced."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return "\n".join([before + BEGIN, *lines(), END]) + after


def lines() -> Iterator[str]:
    """Yield the table as Markdown: architectures by their attentions."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows():
        cells = tuple(row[column] for column in COLUMNS[1:])
        if any(cells):
            groups.setdefault(cells, []).append(row["model_type"])
    yield f"Measured with transformers {version('transformers')}."
    yield ""
    yield "| apart | apart by trainctl's positions | refused | `model_type` |"
    yield "|---|---|---|---|"
    for cells, names in sorted(groups.items(), key=lambda each: -len(each[1])):
        yield f"| {' | '.join(each.replace(' ', ', ') for each in cells)} | {', '.join(names)} |"


if __name__ == "__main__":
    sys.exit(main())
