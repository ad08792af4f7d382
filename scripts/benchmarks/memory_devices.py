"""Memory of a row's device, and the part of it that torch's libraries take."""

from __future__ import annotations

import re

from memory_rows import GIB, Metric, NotExpressible, Row

from trainctl.config.schema import Accelerator

MIB = 2**20

CAPACITIES = {
    "h200": (141,),
    "gh200": (96, 144),
    "gb200": (186,),
    "gb300": (288,),
    "b200": (180,),
    "b300": (288,),
    "h100": (80,),
    "h800": (80,),
    "h20": (96,),
    "a100": (40, 80),
    "a800": (80,),
    "v100": (16, 32),
    "p100": (16,),
    "l40s": (48,),
    "l40": (48,),
    "a40": (48,),
    "a6000": (48,),
    "a10g": (24,),
    "a10": (24,),
    "l4": (24,),
    "t4": (16,),
    "5090": (32,),
    "4090": (24,),
    "3090": (24,),
    "mi300x": (192,),
    "mi325x": (256,),
    "mi355x": (288,),
    "mi250x": (64,),
    "mi250": (64,),
    "mi210": (64,),
}
"""GB of each device by the vendors' data sheets, the smaller variant first. torch sees an MI250 as
two devices.
"""

NO_DEVICE = re.compile(r"\b(tpu|cpus?|hpu|gaudi\d?|trainium|trn\d|ascend|npu|apple)\b")
NEW = re.compile(r"g?[hb][123]00|gh200|h20\b|h800")
"""Devices of compute capability 9.0 and 10.0."""


def accelerator_of(row: Row) -> Accelerator:
    """Return the accelerator kind of the device.

    Raises:
        NotExpressible: torch's CUDA allocator does not run on it.
    """
    text = row.words("gpu")
    if NO_DEVICE.search(text):
        raise NotExpressible(f"on {row['gpu']} no CUDA allocator gives out memory")
    return Accelerator.rocm if re.search(r"\bmi\d{3}|radeon", text) else Accelerator.cuda


def capacity_of(row: Row) -> int | None:
    """Return the bytes of the named device; None where the row does not tell.

    Where a device comes in two sizes, a job that ran is assigned the larger one, and a job that ran
    out of memory the smaller one.
    """
    text = row.words("gpu").replace("rtx", "rtx ")
    match = (
        re.search(r"(?<![a-z\d])(\d+)\s*gi?b\b", text)
        or re.search(r"[a-z]\d+[a-z]?(?:[-_ ][a-z]+\d?)*[-_ ](\d{2,3})(?:g|\b)", text)
        or re.search(r"<=\s*(\d+)", row["value"])
    )
    if match:
        return int(match.group(1)) * GIB
    for name, sizes in CAPACITIES.items():
        if re.search(rf"(?<![a-z])(?:\d+x)?{name}(?!\d)", text):
            return (sizes[0] if row.metric is Metric.out_of_memory else sizes[-1]) * GIB
    return None


def devices_of(row: Row) -> int:
    """Return the number of devices in their name («8xH100»), or 1."""
    match = re.search(r"(?:(\d+)\s*x\s*)?(\d+)\s*[x×]\s*[a-z]+\d", row.words("gpu"))
    return int(match[1] or 1) * int(match[2]) if match else 1


def workspace_of(row: Row) -> int:
    """Return the bytes of cuBLAS's workspaces in torch's allocator, for the threads of the forward
    pass and of autograd.

    A workspace has 32 MiB on Hopper and Blackwell, else 4096 KiB twice and 16 KiB eight times
    (`parseChosenWorkspaceSize`, ATen/cuda/CublasHandlePool.cpp).
    """
    text = row.words("gpu")
    one = 32 * MIB if NEW.search(text) or not text else 2 * 4 * MIB + 8 * 16 * 1024
    return 2 * one
