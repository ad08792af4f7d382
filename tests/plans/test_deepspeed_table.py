"""Tests that the table of keys reads a rendered configuration back to its own values."""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import config_with, gpus

from trainctl.config.codec import to_plain
from trainctl.config.keys import leaves
from trainctl.config.schema import RunConfig
from trainctl.migration.configs.import_values import wanted_values
from trainctl.plans.deepspeed import derived_settings, nest_settings
from trainctl.plans.deepspeed_table import SOURCES, TABLE, Modes
from trainctl.plans.types import Batch, Mesh
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed_schema import load

RANKS = 4
MESH = Mesh(data=RANKS, tensor=1, pipeline=1, sequence=1)
BATCH = Batch(
    global_batch_size=32, micro_batch_size=4, gradient_accumulation_steps=2, sequence_length=64
)


def any_value(key: str) -> st.SearchStrategy[Any]:
    """Return a strategy of values that the key takes, in plain form."""
    leaf = leaves()[key]
    kinds = get_args(leaf.hint) or (leaf.hint,)
    kind = next(each for each in kinds if each is not type(None))
    least, most = leaf.metadata["minimum"], leaf.metadata["maximum"]
    if issubclass(kind, Enum):
        values = st.sampled_from([each.value for each in kind])
    elif kind is bool:
        values = st.booleans()
    elif kind is int:
        values = st.integers(least or 0, most or 2_000_000_000)
    elif kind is float:
        values = st.floats(least or 0.001, most or 65536.0)
    else:
        values = st.sampled_from(["/nvme", "/a b"])
    is_optional = type(None) in kinds and kind is not str
    return st.none() | values if is_optional else values


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Configs that DeepSpeed would take: what is offloaded has its stage."""
    changes = {key: draw(any_value(key)) for key in dict.fromkeys(SOURCES.values())}
    stage = draw(st.integers(0, 3))
    compute = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    devices = ["none", "cpu", "nvme"] if stage == 3 else ["none", "cpu"] if stage else ["none"]
    states = draw(st.sampled_from(devices))
    formats = st.none() | st.sampled_from(["fp32", "bf16", "fp16"])
    changes |= {
        "zero_stage.stage": stage,
        "offload.optimizer": states,
        "offload.parameters": draw(st.sampled_from(devices if stage == 3 else ["none"])),
        "offload.zenflow": states == "cpu" and draw(st.booleans()),
        "precision.compute": compute,
        "precision.master_weights": draw(st.sampled_from(["fp32", compute])),
        "precision.optimizer_states": draw(st.sampled_from(["fp32", compute])),
        "precision.gradient_accumulation": draw(formats),
        "precision.communication": draw(formats),
        "precision.autocast": compute == "bf16" and draw(st.booleans()),
        "optimizer.gradient_clipping": draw(st.floats(0, 10)),
        "logging.deepspeed_level": draw(st.sampled_from(["debug", "info", "warning"])),
        "script": "train.py",
    }
    return config_with(**{key.replace(".", "__"): value for key, value in changes.items()})


def rendered(config: RunConfig) -> dict[str, Any]:
    return nest_settings(derived_settings(config, gpus(RANKS), MESH, BATCH))


def plain(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return to_plain(getattr(getattr(config, section), name))


@given(configs())
@settings(deadline=None)
def test_a_config_comes_back_from_its_json(config: RunConfig) -> None:
    json = rendered(config)
    wanted = wanted_values(Case(json, JsonContext(world_size=RANKS, fills_auto=True)))
    modes = Modes.of(config)
    for row in TABLE:
        on = row.read is not None and row.holds(modes) and row.key in flat(json)
        if on:
            assert wanted.settings[row.source] == plain(config, row.source), row.key
    compute = wanted.choices["precision"]
    changes = {
        "script": "train.py",
        "zero_stage.stage": int(wanted.choices["zero_stage"]),
        "precision.compute": compute.removeprefix("autocast-"),
        **wanted.settings,
    }
    again = config_with(**{key.replace(".", "__"): value for key, value in changes.items()})
    assert rendered(again) == json


def flat(json: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in json.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def test_each_row_is_a_key_of_both() -> None:
    names = [row.key for row in TABLE]
    assert len(names) == len(set(names))
    assert set(names) <= load().keys.keys()
    assert {row.source for row in TABLE if row.source} <= leaves().keys()
