"""Choice of the kernels that a configuration leaves open: the fastest that its rules allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from trainctl.config.codec import to_plain
from trainctl.config.derived import DerivedValue, derived
from trainctl.config.keys import leaves
from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    KernelsConfig,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.data import SampleKind
from trainctl.options.engine import engine_of
from trainctl.options.model import architecture
from trainctl.options.objective import objective_of
from trainctl.options.precision import precision_of
from trainctl.plans.settings import document_reasons
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import registered

KEYS = ("liger", "cross_entropy", "compile")


class _Choice(NamedTuple):
    """Values of `KEYS`."""

    liger: bool
    cross_entropy: CrossEntropyKind
    compile: CompileKind


_LIGER = (
    _Choice(True, CrossEntropyKind.liger_fused, CompileKind.none),
    _Choice(True, CrossEntropyKind.plain, CompileKind.none),
)
_COMPILED = _Choice(False, CrossEntropyKind.plain, CompileKind.blocks)
_PLAIN = _Choice(False, CrossEntropyKind.plain, CompileKind.none)

_RULES = tuple(
    rule
    for rule in registered()
    if not rule.file
    and rule.code != "TC099"  # reads every key for one that has no effect
    and any(key == "*" or key.startswith("kernels.") for key in rule.keys)
)
"""Rules that may refuse a kernel."""


def with_kernels(config: RunConfig, hardware: Hardware) -> RunConfig:
    """Return the configuration with the kernels that it leaves open, as far as they depend on no
    batch.
    """
    nothing = {"mesh": None, "batch": None, "batches": None, "total_steps": None}
    return choose_kernels(Draft(config=config, hardware=hardware, **nothing))[0].config


def choose_kernels(draft: Draft) -> tuple[Draft, tuple[DerivedValue, ...]]:
    """Return the draft with the kernels that its configuration leaves open, and the reasons, that
    of attention to masked documents among them.

    A choice is possible if no rule says more of it than of the plain kernels.
    """
    config, kernels = draft.config, draft.config.kernels
    open_keys = [key for key in KEYS if getattr(kernels, key) is None]
    attention = tuple(document_reasons(config, draft.hardware))
    if not open_keys:
        return draft, attention
    plain = _filled(kernels, _PLAIN)
    refused: dict[str, str] = {}
    for choice in _choices(config):
        agrees = all(getattr(kernels, key) in (None, getattr(choice, key)) for key in KEYS[::2])
        if not agrees:
            continue
        filled = _filled(kernels, choice)
        objection = next(_objections(draft, filled, plain), "")
        if not objection:
            break
        fused = filled.cross_entropy is CrossEntropyKind.liger_fused
        part = "compile" if not filled.liger else "cross_entropy" if fused else "liger"
        refused[part] = objection
    else:
        filled = plain
    why = _reasons(draft, filled, refused)
    reasons = (
        derived(f"kernels.{key}", to_plain(getattr(filled, key)), *_keys_in(why[key]), why=why[key])
        for key in open_keys
    )
    chosen = replace(draft, config=replace(config, kernels=filled))
    return chosen, (*(reasons if config.trains_itself else ()), *attention)


def _keys_in(reason: str) -> tuple[str, ...]:
    """Return the keys that a reason names, in its order."""
    words = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", reason)
    return tuple(word for word in dict.fromkeys(words) if word in leaves())


def _choices(config: RunConfig) -> Iterator[_Choice]:
    """Yield the fused kernels, the fastest first: products in fp8 scale their factors by many
    small operations, which only the compiler fuses.
    """
    if precision_of(config.precision).product_bytes is not None:
        yield _COMPILED
        yield from _LIGER
    else:
        yield from _LIGER
        yield _COMPILED


def _filled(kernels: KernelsConfig, choice: _Choice) -> KernelsConfig:
    open_keys = [key for key in KEYS if getattr(kernels, key) is None]
    return replace(kernels, **{key: getattr(choice, key) for key in open_keys})


def _objections(draft: Draft, chosen: KernelsConfig, plain: KernelsConfig) -> Iterator[str]:
    """Yield what speaks against kernels that the user has not asked for."""
    config = draft.config
    if not config.trains_itself:
        yield "a script has its own"
    elif draft.hardware.accelerator is Accelerator.cpu:
        yield "the devices are CPUs"
    elif chosen.liger and config.kernels.liger is None and draft.hardware.has_liger is False:
        yield "liger-kernel is not installed here"
    elif chosen.compile is CompileKind.blocks and config.kernels.compile is None:
        yield from _why_not_compiled(config)
    allowed = set(_problems(draft, plain))
    yield from (text for text in _problems(draft, chosen) if text not in allowed)


def _why_not_compiled(config: RunConfig) -> Iterator[str]:
    family = architecture(config.model)
    if config.model.factory is not None or family is None:
        yield "torch.compile has not been tried with this architecture"
    elif config.parallelism.pipeline > 1:
        yield "torch.compile has not been tried with pipeline stages"
    elif config.zero_stage.stage == 3 and engine_of(config).takes_json:
        yield "DeepSpeed's hooks at ZeRO stage 3 cut the graphs of torch.compile"
    elif objective_of(config.objective).takes is SampleKind.prompts:
        yield "torch.compile would compile anew for each length of the answers"


def _problems(draft: Draft, kernels: KernelsConfig) -> Iterator[str]:
    tried = replace(draft, config=replace(draft.config, kernels=kernels))
    return (problem.message for rule in _RULES for problem in rule.problems(tried))


def _reasons(draft: Draft, filled: KernelsConfig, refused: dict[str, str]) -> dict[str, str]:
    """Return by key why its value was chosen, with what speaks against faster kernels."""
    if filled.liger:
        is_there = draft.hardware.has_liger or draft.config.kernels.liger
        where = "installed" if is_there else f"assumed to be installed on {draft.hardware.name}"
        return {
            "liger": f"liger-kernel is {where} and knows the model",
            "cross_entropy": refused.get("cross_entropy", "kernels.liger=true"),
            "compile": "kernels.liger=true fuses what it would",
        }
    without = refused.get("liger", "the rest of the section")
    is_compiled = filled.is_compiled
    return {
        "liger": without if "liger" in refused or not is_compiled else "the compiler fuses more",
        "cross_entropy": "kernels.liger=false",
        "compile": refused.get("compile", without)
        if not is_compiled
        else "precision.compute=fp8 scales its products by many small operations, which it fuses"
        if precision_of(draft.config.precision).product_bytes is not None
        else "on GPUs, without liger-kernel",
    }
