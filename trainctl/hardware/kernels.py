"""Checks that packages and compilers for the plan's kernels are installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    CompileKind,
    CrossEntropyKind,
    RunConfig,
)
from trainctl.errors import Finding
from trainctl.hardware.facts import Hardware
from trainctl.hardware.finding import problem
from trainctl.options.adapter import low_rank

COMPILERS = ("g++", "clang++", "c++")
"""Compilers that torch.compile looks for on a CPU, unless CXX names another."""


def kernels_are_installed(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find missing packages and compilers that the plan's kernels need; imports none."""
    for key, value, needed, hint in _missing(config, hardware):
        yield problem(
            "TC136", key, f"{key}={value} needs {needed}, which is not installed here", hint
        )


def _missing(config: RunConfig, hardware: Hardware) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, what it needs, and a hint, for each missing package or compiler."""
    kernels = config.kernels
    flash = AttentionKind.flash_attention_2
    if config.model.attention is flash and find_spec("flash_attn") is None:
        hint = "model.attention=sdpa, which has torch's own FlashAttention, or install flash-attn"
        yield "model.attention", flash.value, "the package flash-attn", hint
    if find_spec("liger_kernel") is None:
        if kernels.liger:
            hint = "kernels.liger=false, or pip install 'trainctl[liger]'"
            yield "kernels.liger", "true", "the package liger-kernel", hint
        if kernels.cross_entropy is CrossEntropyKind.liger_fused:
            hint = "kernels.cross_entropy=chunked, or pip install 'trainctl[liger]'"
            yield "kernels.cross_entropy", "liger_fused", "the package liger-kernel", hint
    adapter = low_rank(config.adapter)
    if adapter is not None and adapter.is_quantized and find_spec("bitsandbytes") is None:
        hint = "adapter.base_weights=compute, or pip install 'trainctl[qlora]'"
        kind = adapter.base_weights.value
        yield "adapter.base_weights", kind, "the package bitsandbytes", hint
    if kernels.compile is CompileKind.none:
        return
    if hardware.accelerator is Accelerator.cpu:
        if not any(map(shutil.which, (os.environ.get("CXX") or "g++", *COMPILERS))):
            hint = "kernels.compile=none, or install g++"
            yield "kernels.compile", kernels.compile.value, "a C++ compiler", hint
    elif find_spec("triton") is None:
        hint = "kernels.compile=none, or a torch that brings triton"
        yield "kernels.compile", kernels.compile.value, "the package triton", hint
