"""Run as a process: growth of its peak memory while a checkpoint is exported."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from pkgutil import resolve_name

import torch
from memory_probe import status_bytes

from trainctl.config.codec import from_plain
from trainctl.config.schema import RunConfig
from trainctl.train.models.model import skeleton


def main() -> None:
    plain, checkpoint, out, function, settings = pickle.load(sys.stdin.buffer)
    export = resolve_name(function)
    config = from_plain(RunConfig, plain)
    # Before the measurement, so that transformers' imports are not counted.
    skeleton(config.model, torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    exported = export(config, checkpoint, out, **settings)
    growth = status_bytes("VmHWM") - before
    print(json.dumps({"growth": growth, "bytes": exported.size_bytes, "files": exported.files}))


if __name__ == "__main__":
    main()
