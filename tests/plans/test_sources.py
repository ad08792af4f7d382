"""The keys that a derived value follows from are those that its reason names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import get_args, get_origin

import pytest
from plan_cases import config_with, cpus, gpus

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.derived import DerivedValue
from trainctl.config.keys import leaves
from trainctl.rules.resolve import resolve

SCRIPT = {"script": "train.py"}
NVME = {"offload__optimizer": "nvme", "offload__parameters": "nvme", "offload__nvme_path": "/n"}
ZENFLOW = {"zero_stage__stage": 2, "offload__optimizer": "cpu", "offload__zenflow": True}
BASES = {
    "trainer": ({}, gpus(8)),
    "cpu": ({"zero_stage__stage": 0, "precision__compute": "fp32"}, cpus(2)),
    "script": ({"optimizer__kind": "muon", **SCRIPT}, gpus(8)),
    "fp16": ({"precision__compute": "fp16", "precision__autocast": True}, gpus(8)),
    "nvme": ({"zero_stage__stage": 3, **NVME}, gpus(2)),
    "zenflow": ({**ZENFLOW, **SCRIPT}, gpus(2)),
    "pipeline": ({"parallelism__pipeline": 2}, gpus(8)),
    "axes": ({"parallelism__tensor": 2, "parallelism__sequence": 2, **SCRIPT}, gpus(8)),
    "mup": ({"model__mup": True, "model__mup_base_width": 64}, gpus(8)),
    "wsd": ({"schedule__kind": "wsd", "schedule__decay_tokens": 100_000}, gpus(8)),
    "ramp": (
        {
            "training__steps": None,
            "training__tokens": 10_000_000,
            "training__global_batch_tokens": 131_072,
            "training__batch_ramp": [{"until_steps": 4, "global_batch_size": 8}],
            "training__stop_after_steps": 3,
        },
        gpus(8),
    ),
    "epochs": (
        {"training__steps": None, "training__epochs": 2.0, "training__epoch_tokens": 1_000_000},
        gpus(8),
    ),
    "scaled": (
        {
            "optimizer__kind": "muon",
            "optimizer__matrix_lr": 0.01,
            "optimizer__lr_scaling": "sqrt",
            "optimizer__lr_scaling_batch_size": 4,
            "gradients__adaptive_clipping": "mean",
        },
        gpus(8),
    ),
}


def named_in(reason: str) -> tuple[str, ...]:
    """Return the configuration keys that a reason names, in its order."""
    words = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", reason)
    return tuple(word for word in dict.fromkeys(words) if word in leaves())


def variants(changes: dict) -> Iterator[dict]:
    """Yield the base, and the base with each single switch or choice changed."""
    yield changes
    for key, leaf in leaves().items():
        kinds = [kind for kind in get_args(leaf.hint) or (leaf.hint,) if isinstance(kind, type)]
        values = [value for kind in kinds if issubclass(kind, Enum) for value in kind]
        values += [True, False] if bool in kinds else []
        values += [None] if type(None) in kinds else []
        for value in values:
            plain = getattr(value, "value", value)
            turned = [plain] if get_origin(leaf.hint) is list else plain
            yield changes | {key.replace(".", "__"): turned}


def derived(base: str) -> list[DerivedValue]:
    changes, hardware = BASES[base]
    found = []
    for variant in variants(changes):
        plan = resolve(config_with(**variant), hardware).plan
        found += plan.derived if plan else ()
    assert found, base
    return found


QUICK = ("trainer", "nvme", "axes", "ramp", "scaled")


@pytest.mark.parametrize(
    "base",
    [pytest.param(base, marks=() if base in QUICK else pytest.mark.slow) for base in BASES],
)
def test_a_reason_names_what_the_value_follows_from(base: str) -> None:
    for item in derived(base):
        assert item.sources == named_in(item.reason), item


def test_a_derived_value_of_an_older_plan_has_no_sources() -> None:
    old = {"key": "total_steps", "value": 10, "reason": "training.steps"}
    assert from_plain(DerivedValue, old).sources == ()
    assert to_plain(from_plain(DerivedValue, old)) == {**old, "sources": []}
