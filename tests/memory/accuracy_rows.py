"""Rows made up for tests of `scripts/benchmarks/memory_accuracy.py`, and what it makes of them."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "benchmarks"
DATA = ROOT / "tests" / "data"


def load(name: str = "memory_accuracy") -> Any:
    """Import a script as a module, without the peers that need other packages."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        module = importlib.import_module(name)
        importlib.import_module("memory_peers").PEERS.clear()
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def columns() -> list[str]:
    """Return the columns of the published measurements."""
    with (DATA / "memory_measurements.csv").open() as file:
        lines = [line for line in file if not line.startswith("#")]
    return next(csv.reader(lines))


def rows(accuracy: Any, folder: Path, *texts: dict[str, str]) -> Any:
    """Rows by way of a file, as anyone's would be."""
    path, names = folder / "rows.csv", columns()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dict.fromkeys(names, "") | text for text in texts)
    return accuracy.read_rows(path)


LLAMA = {
    "id": "a",
    "tier": "A",
    "framework": "DeepSpeed",
    "model": "llama3.1-8b",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "micro_batch": "1",
    "precision": "bf16 fp32-master",
    "optimizer": "AdamW",
    "sharding": "ZeRO-3",
    "world_gpus": "8",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "ac_mode": "full",
    "offload": "none",
    "gpu": "8xH100-80",
    "metric": "max_memory_allocated",
    "value": "40",
    "unit": "GiB",
    "value_gib": "40",
}
TITAN = LLAMA | {
    "framework": "torchtitan",
    "sharding": "FSDP2",
    "ac_mode": "selective (op)",
    "optimizer": "AdamW (fused)",
}
MEGATRON = LLAMA | {
    "framework": "Megatron-LM",
    "sharding": "distributed optimizer (ZeRO-1)",
    "precision": "bf16 fp32-main-grads",
    "tp": "2",
    "dp": "4",
}
ALONE = LLAMA | {
    "framework": "transformers Trainer",
    "sharding": "none",
    "world_gpus": "1",
    "dp": "1",
    "precision": "bf16 autocast",
    "gpu": "1xH200",
}
