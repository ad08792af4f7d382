"""Run as a process: growth of its peak memory while a checkpoint is exported."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch
from memory_probe import status_bytes

from trainctl.config.codec import from_plain
from trainctl.config.schema import RunConfig
from trainctl.train.export.directory import export
from trainctl.train.models.model import skeleton


def main() -> None:
    plain, checkpoint, out, shard_bytes = pickle.load(sys.stdin.buffer)
    config = from_plain(RunConfig, plain)
    # Before the measurement, so that transformers' imports are not counted.
    skeleton(config.model, torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    exported = export(config, checkpoint, out, dtype=torch.bfloat16, shard_bytes=shard_bytes)
    growth = status_bytes("VmHWM") - before
    print(json.dumps({"growth": growth, "bytes": exported.size_bytes, "files": exported.files}))


if __name__ == "__main__":
    main()
