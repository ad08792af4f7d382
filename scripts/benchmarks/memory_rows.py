"""Published measurements of memory, one a row of a CSV, read into typed fields.

The columns are those of `tests/data/memory_measurements.csv`, which says where each row is from.
Free text («full per layer (HF, non-reentrant)») is matched by words; what cannot be told from a
row raises `NotExpressible` with the reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

GIB = 2**30
UNITS = {"bytes": 1, "b": 1, "mb": 2**20, "mib": 2**20, "gb": GIB, "gib": GIB, "gb(2^30)": GIB}
DECIMAL = ("1e9", "10^9")


class NotExpressible(Exception):
    """A row that says too little, or describes what the estimator has no term for."""


class Metric(Enum):
    """What a row measured."""

    after_step = "allocated after a step"
    peak = "peak allocated"
    reserved = "reserved"
    driver = "as the driver reports it"
    fits = "fits"
    out_of_memory = "out of memory"


class Recompute(Enum):
    """What is recomputed in the backward pass."""

    none = "none"
    full = "full"
    operations = "selected operations"
    attention = "core attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        text: The columns as they came.
        metric: What was measured.
        measured: The measurement in bytes; None where only «fits» is known.
    """

    text: dict[str, str]
    metric: Metric
    measured: float | None

    @property
    def id(self) -> str:
        return self.text["id"]

    def __getitem__(self, column: str) -> str:
        return self.text.get(column) or ""

    def words(self, *columns: str) -> str:
        """Columns as one lower-case text."""
        return " ".join(self[column] for column in columns).lower()

    def number(self, column: str, default: int | None = None) -> int:
        """The first whole number in a column (`Ulysses SP 8` is 8).

        Raises:
            NotExpressible: There is none, and no default.
        """
        found = re.search(r"\d[\d_,]*", self[column])
        if found:
            return int(found.group().replace("_", "").replace(",", ""))
        if default is None:
            raise NotExpressible(f"{column} is not given")
        return default


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV of measurements, or of a table of configurations that ran."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("#")]
    records = [
        {key: (value or "").strip() for key, value in line.items() if key is not None}
        for line in csv.DictReader(lines)
    ]
    if records and "MP Mode" in records[0]:
        records = [_of_throughput_table(record, index) for index, record in enumerate(records)]
    return [_read(record) for record in records]


def _read(record: dict[str, str]) -> Row:
    metric = _metric(record)
    return Row(text=record, metric=metric, measured=_measured(record, metric))


def _metric(record: dict[str, str]) -> Metric:
    text = f"{record['metric']} {record.get('value', '')}".lower()
    if "oom" in text or "out of memory" in text or "does not fit" in text:
        return Metric.out_of_memory
    if "fits" in text or record.get("tier") == "F":
        return Metric.fits
    if any(word in text for word in ("nvml", "smi", "driver", "wandb", "gpu memory used")):
        return Metric.driver
    if "reserved" in text:
        return Metric.reserved
    if "after" in text or "log point" in text or "resident" in text or "static" in text:
        return Metric.after_step
    return Metric.peak


def _measured(record: dict[str, str], metric: Metric) -> float | None:
    if metric in (Metric.fits, Metric.out_of_memory):
        return None
    if record.get("value_gib"):
        return float(record["value_gib"]) * GIB
    unit = record["unit"].lower()
    scale = 10**9 if any(word in unit for word in DECIMAL) else UNITS[unit.split()[0]]
    return float(record["value"]) * scale


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
    """A row of llm-foundry's throughput table: it ran, so it fits. Its models have no biases, tie
    the output projection, and learn a position embedding of the sequence length."""
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
