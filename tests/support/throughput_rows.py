"""Published throughputs as plans: the rows of `tests/data/throughput.csv` in trainctl's terms."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.keys import convert_value, leaves
from trainctl.config.schema import HardwareConfig, RunConfig
from trainctl.hardware import Hardware
from trainctl.models.anatomy import shape_from_anatomy
from trainctl.plans.derive import derive_batch, derive_mesh, derive_stages
from trainctl.plans.types import LayoutPlan
from trainctl.tuning.rates import OVERLAP
from trainctl.tuning.speed import step_time

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "data" / "throughput.csv"
PUBLISHED = ROOT / "trainctl" / "models" / "published_models.json"


@dataclass(frozen=True)
class Row:
    """Published measurement."""

    name: str
    table: str
    """Measurements taken under the same conditions, which may be compared with each other."""
    was_fitted: bool
    """Whether constants of the model were fitted to it."""
    plan: LayoutPlan
    """Plan with the parts that the step-time model reads."""
    seconds: float
    """Measured seconds of an optimizer step."""
    interleaved: int
    """Pieces of the model on each pipeline stage."""
    tensor_overlaps: bool
    """Whether tensor-parallel collectives overlapped with matrix products."""

    @property
    def is_of_run(self) -> bool:
        """Whether the rate is that of a whole run: hours for tokens, with all losses."""
        return self.table.startswith("run ")

    @property
    def has_experts(self) -> bool:
        return (self.plan.config.model.num_experts or 1) > 1

    @property
    def is_kept(self) -> bool:
        """Whether it is kept back for checking: no constant was ever fitted to it.

        A hash of the table's name decides, so that measurements under the same conditions are on
        the same side, and no error is looked at. Rows that constants were fitted to before this
        rule are not kept, whatever their table.
        """
        even = hashlib.sha256(self.table.encode()).digest()[0] % 2 == 0
        return even and not self.was_fitted and not self.is_of_run

    @property
    def predicted(self) -> float:
        """Return the modelled seconds, corrected for what DeepSpeed lacks and this run had.

        `interleaved` pieces on each stage divide the pipeline bubble by their number
        (arXiv:2104.04473, section 2.2), and Megatron's `--tp-comm-overlap` hides collectives.
        """
        time = step_time(self.plan)
        hidden = OVERLAP * time.tensor if self.tensor_overlaps else 0.0
        return time.seconds - time.bubble * (1 - 1 / self.interleaved) - hidden

    @property
    def error_with_hidden_exchange(self) -> float:
        """Return the relative error if computation hid the exchange of tokens, as DualPipe and
        DeepEP do in part.
        """
        return (self.predicted - step_time(self.plan).experts) / self.seconds - 1

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.seconds - 1


@cache
def rows() -> tuple[Row, ...]:
    with TABLE.open(newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file))


def _row(line: dict[str, str]) -> Row:
    settings = dict(setting.split("=", 1) for setting in line["settings"].split())
    published, sparse = settings.pop("published", None), settings.pop("sparse", None)
    values = {
        key: convert_value(leaves()[key], yaml.safe_load(text), text)
        for key, text in settings.items()
    }
    if published is not None:
        values |= published_model(published)
    elif sparse is not None:
        values = sparse_model(values, *map(int, sparse.split("/")))
    if values.get("zero_stage.stage") == 3 and not line["table"].startswith("DeepSpeed"):
        values["engine.kind"] = "fsdp2"  # whose hooks are a block's, not a module's
    nodes, devices = int(line["nodes"]), int(line["devices"])
    facts = {key.removeprefix("hardware."): v for key, v in values.items() if "hardware." in key}
    hardware = hardware_of(line["hardware"], nodes, devices, **facts)
    plan = plan_of(hardware, {k: v for k, v in values.items() if "hardware." not in k})
    rate = float(line["tokens_per_second_per_device"]) * plan.mesh.world_size
    return Row(
        name=line["id"],
        table=line["table"],
        was_fitted=line["split"] == "fit",
        plan=plan,
        seconds=plan.batch.tokens_per_step / rate,
        interleaved=int(line["interleaved"]),
        tensor_overlaps=line["tensor_overlaps"] == "true",
    )


def plan_of(hardware: Hardware, values: Mapping[str, Any]) -> LayoutPlan:
    """Compose a plan with the given keys, as far as the step-time model reads it; no rule is
    checked.
    """
    config = config_of(values)
    mesh, _ = derive_mesh(config.parallelism, hardware)
    assert mesh is not None
    batch, _ = derive_batch(config.training, mesh.data)
    assert batch is not None
    return LayoutPlan(
        config=config,
        hardware=hardware,
        mesh=mesh,
        batch=batch,
        stage_blocks=derive_stages(config)[0],
    )


def config_of(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the given dotted keys as plain data."""
    plain = to_plain(RunConfig())
    for key, value in values.items():
        section, name = key.split(".")
        assert key in leaves(), key
        plain[section][name] = value
    return from_plain(RunConfig, plain)


def hardware_of(option: str, nodes: int, devices: int, **facts: Any) -> Hardware:
    """Return an option of `hardware` as declared, without probing this machine."""
    text = (ROOT / "conf" / "hardware" / f"{option}.yaml").read_text()
    plain = to_plain(HardwareConfig()) | yaml.safe_load(text) | facts
    config = from_plain(HardwareConfig, plain | {"nodes": nodes, "devices_per_node": devices})
    names = set(Hardware.__dataclass_fields__) & set(HardwareConfig.__dataclass_fields__)
    return Hardware(**{name: getattr(config, name) for name in names})


@cache
def published_model(name: str) -> dict[str, Any]:
    """Return the keys of a published model's section, as a directory of it would fill them."""
    table = json.loads(PUBLISHED.read_text())["models"][name]["anatomy"]
    shape = {f"model.{key}": value for key, value in shape_from_anatomy(table).items()}
    return shape | {"model.family": "hf", "model.name": name, "model.anatomy": table}


def sparse_model(values: Mapping[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """Return the keys of a model of Mixtral's form with the shape in `values`."""
    size = {key.removeprefix("model."): v for key, v in values.items() if key.startswith("model.")}
    width, inner, heads = (
        size[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    each, keys, rows = width // heads, size["num_key_value_heads"], size["vocab_size"]
    block = f"model.layers.{{0-{size['num_layers'] - 1}}}"
    table = [
        "model supports sdpa",
        f"model.embed_tokens.weight {rows}x{width} embedding",
        *(
            f"{block}.self_attn.{name}.weight {out}x{width} weight"
            for name, out in (
                ("q_proj", width),
                ("k_proj", keys * each),
                ("v_proj", keys * each),
                ("o_proj", width),
            )
        ),
        f"{block}.mlp.gate.weight {experts}x{width} router",
        f"{block}.mlp.experts.gate_up_proj {experts}x{2 * inner}x{width} expert",
        f"{block}.mlp.experts.down_proj {experts}x{width}x{inner} expert",
        f"{block}.input_layernorm.weight {width} norm",
        f"{block}.post_attention_layernorm.weight {width} norm",
        f"model.norm.weight {width} norm",
        f"lm_head.weight {rows}x{width} head",
        f"{block} block 0 experts={experts}/{per_token} attention={heads}x{each}x{each}",
    ]
    found = {"model.family": "hf", "model.anatomy": table, "model.num_experts": experts}
    return {**values, **found, "model.experts_per_token": per_token}
