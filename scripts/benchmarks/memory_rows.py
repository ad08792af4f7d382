"""Published memory measurements, one per row of a CSV, parsed into typed fields.

The columns are those of `tests/data/memory_measurements.csv`, which gives the source of each row.
Free text («full per layer (HF, non-reentrant)») is matched by words; where a row is ambiguous,
`NotExpressible` is raised with the reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from memory_metrics import GIB, Metric, NotExpressible, measured_bytes, metric_of

__all__ = ["GIB", "Metric", "NotExpressible", "Recompute", "Row", "read_rows"]


class Recompute(Enum):
    """Part of a block that is recomputed in the backward pass."""

    none = "none"
    full = "full"
    operations = "selected operations"
    attention = "core attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Published measurement."""

    text: dict[str, str]
    """Unparsed columns."""
    metric: Metric | None
    """Kind of measured figure; None if `unread` is set."""
    measured: float | None
    """Measured bytes; None where only «fits» is known."""
    unread: str = ""
    """Reason why there is no measurement to score; empty if there is one."""

    @property
    def id(self) -> str:
        return self.text["id"]

    def __getitem__(self, column: str) -> str:
        return self.text.get(column) or ""

    def words(self, *columns: str) -> str:
        """Return the columns as one lower-case text."""
        return " ".join(self[column] for column in columns).lower()

    def number(self, column: str, default: int | None = None) -> int:
        """Return the first whole number in a column: `Ulysses SP 8` is 8, `8k` tokens are 8192.

        Raises:
            NotExpressible: There is none and no default, or it is no whole number.
        """
        match = NUMBER.search(self[column].lower())
        if not match:
            if default is None:
                raise NotExpressible(f"{column} is not given")
            return default
        value = float(match["digits"].replace("_", "").replace(",", ""))
        thousand = 1024 if column == "seq_len" else 1000
        value *= {None: 1, "k": thousand, "m": thousand**2}[match["prefix"]]
        if value != int(value):
            raise NotExpressible(f"{column} is {self[column]}, no whole number")
        return int(value)

    def size(self, column: str, default: int | None = None) -> int:
        """Return a number that a model or a batch must have.

        Raises:
            NotExpressible: There is none and no default, or it is 0 or a range.
        """
        value = self.number(column, default)
        if not value or re.match(r"\d+\s*(-|–|to|\.\.)\s*\d", self[column]):
            raise NotExpressible(f"{column} is {self[column]}")
        return value

    def quantity(self, column: str) -> float | None:
        """Return the first positive number in a column, possibly fractional; None without one."""
        match = re.search(r"\d+(\.\d+)?", self[column])
        return float(match.group()) or None if match else None


NUMBER = re.compile(
    r"(?<![a-z])(?P<digits>\d[\d_,]*(?:\.\d+)?(?:e\+?\d+)?)(?:\s?(?P<prefix>[km])(?![a-z]))?"
)
"""A number, but not as part of a name: `GPT2BPE (50257 padded to 128*tp)` is 50257."""


def read_rows(path: Path) -> list[Row]:
    """Read a CSV of measurements, or a table of configurations that ran."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = [line for line in file if not line.startswith("#")]
    records = [
        {key: (value or "").strip() for key, value in line.items() if key is not None}
        for line in csv.DictReader(lines)
    ]
    if records and "MP Mode" in records[0]:
        records = [_of_throughput_table(record, index) for index, record in enumerate(records)]
    return [_read(record) for record in records]


def _read(record: dict[str, str]) -> Row:
    metric = None
    try:
        metric = metric_of(record)
        one_sided = metric in (Metric.fits, Metric.out_of_memory)
        measured = None if one_sided else measured_bytes(record)
    except NotExpressible as reason:
        return Row(text=record, metric=metric, measured=None, unread=str(reason))
    return Row(text=record, metric=metric, measured=measured)


MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads of llm-foundry's models (scripts/train/benchmarking, MPT of its time)."""


def _of_throughput_table(record: dict[str, str], index: int) -> dict[str, str]:
    """Convert a row of llm-foundry's throughput table: it ran, so it fits.

    Its models have no biases, tie the output projection, and learn position embeddings for the
    sequence length.
    """
    layers, hidden, heads = MPT[record["Model"].lower()]
    memory = re.search(r"(\d+)gb", record["GPU"].lower())
    return {
        "id": f"mpt-{record['Model']}-{record['SeqLen (T)']}-{record['GPU']}-{index}",
        "tier": "F",
        "framework": "llm-foundry",
        "source_repo": "mosaicml/llm-foundry",
        "model": f"mpt-{record['Model']}",
        "params_b": str(int(record["NumParams"]) / 1e9),
        "layers": str(layers),
        "hidden": str(hidden),
        "heads": str(heads),
        "kv_heads": str(heads),
        "ffn": str(4 * hidden),
        "vocab": "50368",
        "seq_len": record["SeqLen (T)"],
        "micro_batch": record["MicroBatchSize"],
        "precision": f"{record['Precision']} {record['MP Mode']}",
        "optimizer": "AdamW",
        "sharding": f"FSDP {record['Sharding Strategy']}",
        "world_gpus": record["# GPUs"],
        "dp": record["# GPUs"],
        "tp": "1",
        "pp": "1",
        "ac_mode": "full" if record["Activation Checkpointing"] == "True" else "none",
        "offload": "activations" if record["Activation CPUOffload"] == "True" else "none",
        "attention": "flash",
        "gpu": record["GPU"],
        "metric": "fits",
        "value": f"<={memory.group(1) if memory else ''} (fits)",
    }
