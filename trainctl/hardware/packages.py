"""Checks that installed packages are compatible, and that those of the plan's kernels are there.

They read metadata; nothing is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

from trainctl.config.extras import extra_of, install_command, package_version
from trainctl.config.keys import as_written
from trainctl.config.registry import kind_key, kind_of, load_spec, unit_groups
from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    CrossEntropyKind,
    RunConfig,
)
from trainctl.config.sections import callbacks_of
from trainctl.errors import Finding
from trainctl.hardware.detect import Hardware, driver_cuda_version, error_finding, warning_finding
from trainctl.options.adapter import low_rank
from trainctl.options.data import modules_of_source
from trainctl.options.logger import missing_modules_finding, python_of
from trainctl.readers.remote import modules_of_url

CHECKED_PACKAGES = ("trainctl", "deepspeed", "transformers", "accelerate")
"""Packages whose requirements are compared with what is installed; the last one is optional."""

SHOWN = ("torch", "deepspeed", "transformers", "accelerate")

SLOW_TO_COMPILE = {
    "torch": "torch/__init__.py",
    "transformers": "transformers/modeling_utils.py",
    "deepspeed": "deepspeed/__init__.py",
}
"""A file of each package that has so much source that Python takes seconds to compile it. All ranks
import these packages.
"""


def check_requirements(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find requirements of the packages that are missing, or installed in a wrong version."""
    yield from _check_packages_on_path(tuple(sys.path))


@cache
def _check_packages_on_path(path: tuple[str, ...]) -> tuple[str | Finding, ...]:
    """Return the findings for the packages on `path`, cached: they are slow and no plan changes
    them.
    """
    return tuple(_check_requirements())


def _check_requirements() -> Iterator[str | Finding]:
    from packaging.requirements import InvalidRequirement, Requirement

    is_well = True
    for name in CHECKED_PACKAGES:
        for text in _package_requirements(name):
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            found = package_version(wanted.name)
            if found and wanted.specifier.contains(found, prereleases=True):
                continue
            is_well = False
            has = f"{found} is installed" if found else "is not installed"
            yield error_finding(
                "TC124",
                "",
                f"{name} {package_version(name)} needs {wanted.name} {wanted.specifier}".rstrip()
                + f", and {has}",
                f"pip install '{wanted.name}{wanted.specifier}'",
            )
    if is_well:
        known = [(name, package_version(name)) for name in SHOWN]
        yield ", ".join(f"{name} {found}" for name, found in known if found)


def check_loggers(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find packages that the loggers of `logging.to` import and that are not installed.

    Only the machine that sends to the loggers needs them.
    """
    names = config.logging.to
    found = [
        missing_modules_finding(load_spec("logger", name), python_of(name, config))
        for name in names
    ]
    if found and not any(found):
        yield ", ".join(config.logging.to)
    yield from filter(None, found)


def check_extras(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find packages of trainctl's extras that the plan needs and that are missing; import none.

    A fact names an extra and its packages, those of loggers included.
    """
    extras: dict[str, dict[str, str]] = {}
    for key, value, modules, instead in _optional_modules(config):
        lacking = [module for module in modules if find_spec(module) is None]
        for module in modules:
            state = "missing" if module in lacking else package_version(module) or "installed"
            extras.setdefault(extra_of(module) or "no extra", {})[module] = state
        if lacking and key != "logging.to":  # which has a check of its own
            yield error_finding(
                "TC124",
                key,
                f"{key}={value} needs {', '.join(lacking)}, which is not installed here",
                f"{instead}, or {install_command(*lacking)}"
                if instead
                else install_command(*lacking),
            )
    for name, states in sorted(extras.items()):
        yield f"{name} ({', '.join(f'{module} {state}' for module, state in states.items())})"


def _optional_modules(config: RunConfig) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield keys with their values, the modules that each needs, and a value that needs none."""
    liger, bitsandbytes = ("liger_kernel",), ("bitsandbytes",)
    if config.kernels.liger:
        yield "kernels.liger", "true", liger, "kernels.liger=false"
    if config.kernels.cross_entropy is CrossEntropyKind.liger_fused:
        yield "kernels.cross_entropy", "liger_fused", liger, "kernels.cross_entropy=chunked"
    adapter = low_rank(config.adapter)
    if adapter is not None and adapter.is_quantized:
        kind = adapter.base_weights.value
        yield "adapter.base_weights", kind, bitsandbytes, "adapter.base_weights=compute"
    mirror = config.checkpoint.mirror
    if mirror is not None:
        yield "checkpoint.mirror", mirror, modules_of_url(mirror), ""
    for group in set(unit_groups()) - {"data"}:
        section = getattr(config, group)
        spec = load_spec(group, kind_of(section))
        if spec.modules:
            yield f"{group}.{kind_key(group)}", spec.name, spec.modules, ""
    for group, key, names in (
        ("callbacks", "callbacks", callbacks_of(config)),
        ("logger", "logging.to", config.logging.to),
    ):
        for name in names:
            spec = load_spec(group, name)
            if spec.modules and (group != "logger" or python_of(name, config) == sys.executable):
                yield key, name, spec.modules, ""
    for name, reward in getattr(config.objective, "rewards", {}).items():
        spec = load_spec("reward", kind_of(reward))
        if spec.modules:
            yield f"objective.rewards.{name}.kind", spec.name, spec.modules, ""
    sources: Mapping[str, Any] = config.data.sources or {"": config.data}
    for name, source in sources.items():
        place = f"data.sources.{name}" if name else "data"
        for key, value, modules in modules_of_source(source):
            yield f"{place}.{key}", value, modules, ""


def check_bytecode_cache(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find large packages whose bytecode cannot be cached: each process compiles them again."""
    for name, file in SLOW_TO_COMPILE.items():
        try:
            source = Path(str(metadata.distribution(name).locate_file(file)))
        except metadata.PackageNotFoundError:
            continue  # reported by the first check
        if not source.is_file() or Path(cache_from_source(str(source))).is_file():
            continue
        folder = source.parent
        forbidden = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        if not forbidden and os.access(folder, os.W_OK):
            continue
        why = "PYTHONDONTWRITEBYTECODE is set" if forbidden else f"{folder} cannot be written to"
        yield warning_finding(
            "TC373",
            "",
            f"{name} is not compiled, and {why}: each process compiles what it imports anew",
            "unset PYTHONDONTWRITEBYTECODE"
            if forbidden
            else f"as its owner: python -m compileall -q {folder.parent}",
        )
        return
    yield "kept"


def check_torch_build(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a build of torch for another kind of device, or a driver too old for it."""
    build = torch_build()
    if build is None:
        return  # reported by the check above
    cuda, hip = build
    kind = hardware.accelerator
    if kind is Accelerator.cpu:
        yield f"{package_version('torch')}, on the CPU"
        return
    if (kind is Accelerator.cuda and not cuda) or (kind is Accelerator.rocm and not hip):
        yield error_finding(
            "TC125",
            "hardware.accelerator",
            f"torch {package_version('torch')} was built without {kind.value}",
            f"install torch's {kind.value} build (https://pytorch.org/get-started/locally)",
        )
        return
    driver = driver_cuda_version() if kind is Accelerator.cuda else None
    if driver is not None and driver[0] < _version_numbers(cuda)[0]:
        shown = ".".join(map(str, driver))
        yield error_finding(
            "TC125",
            "hardware.accelerator",
            f"torch {package_version('torch')} is for CUDA {cuda}, "
            f"and the driver supports CUDA {shown}",
            f"a newer driver, or torch's build for CUDA {driver[0]}",
        )
        return
    yield f"{package_version('torch')}, for {f'CUDA {cuda}' if cuda else f'ROCm {hip}'}"


def torch_build() -> tuple[str, str] | None:
    """Return torch's CUDA and HIP versions, empty for a build without; None if it is not
    installed.
    """
    text = packaged_text("torch", "torch/version.py")
    if text is None:
        return None
    found = {
        name: re.search(rf"^{name}\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE)
        for name in ("cuda", "hip")
    }
    cuda, hip = (match[1] if match else "" for match in found.values())
    return cuda, hip


def packaged_text(name: str, file: str) -> str | None:
    """Return the text of a file of an installed package; None if package or file is missing."""
    try:
        path = Path(str(metadata.distribution(name).locate_file(file)))
        return path.read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return None


def _package_requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _version_numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


COMPILERS = ("g++", "clang++", "c++")
"""Compilers that torch.compile looks for on a CPU, unless CXX names another."""


def check_kernels(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find missing packages and compilers that the plan's kernels need; imports none."""
    for key, value, needed, hint in _missing_packages(config, hardware):
        yield error_finding(
            "TC136", key, f"{key}={value} needs {needed}, which is not installed here", hint
        )


def _missing_packages(config: RunConfig, hardware: Hardware) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, what it needs, and a hint, for each missing package or compiler."""
    kernels = config.kernels
    flash = AttentionKind.flash_attention_2
    if config.model.attention is flash and find_spec("flash_attn") is None:
        hint = "model.attention=sdpa, which has torch's own FlashAttention, or install flash-attn"
        yield "model.attention", flash.value, "the package flash-attn", hint
    if not kernels.is_compiled:
        return
    if hardware.accelerator is Accelerator.cpu:
        if not any(map(shutil.which, (os.environ.get("CXX") or "g++", *COMPILERS))):
            hint = "kernels.compile=none, or install g++"
            yield "kernels.compile", as_written(kernels.compile), "a C++ compiler", hint
    elif find_spec("triton") is None:
        hint = "kernels.compile=none, or a torch that brings triton"
        yield "kernels.compile", as_written(kernels.compile), "the package triton", hint
