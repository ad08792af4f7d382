"""The shipped options: all load, all lines are commented, shapes are the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainctl.config.catalog import leading_comment, list_options, shipped_root
from trainctl.config.codec import to_plain
from trainctl.config.compose import compose
from trainctl.config.schema import (
    GROUPS,
    Accelerator,
    DataType,
    HardwareConfig,
    ModelConfig,
)

FILES = sorted((shipped_root() / "conf").rglob("*.yaml"))
CHOICES = [(group, info.name) for group in GROUPS for info in list_options(group)]

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}
"""Parameters, as the model cards' safetensors headers count them."""

PROMISED = {
    "adapter": "none lora dora rslora",
    "optimizer": "adamw adam lion muon adamw_8bit adafactor lamb sgd",
    "schedule": (
        "constant linear cosine wsd polynomial exponential step inverse_sqrt one_cycle cyclic "
        "cosine_restarts milestones plateau"
    ),
    "zero_stage": "0 1 2 3",
    "offload": "none cpu cpu-all cpu-partial nvme nvme-optimizer",
    "precision": "fp32 bf16 fp16 fp8 bf16-low-memory autocast-bf16",
    "parallelism": "data tensor pipeline sequence context 3d",
    "activation_checkpointing": "none full selective offloaded",
    "tokenizer": "byte file hf",
    "launcher": "local ssh slurm mpi kubernetes ray",
    "hardware": (
        "auto cpu t4-16g rtx-4090-24g a100-40g a100-80g h100-80g h200-141g b200-192g mi300x-192g"
    ),
}


@pytest.mark.parametrize(
    ("group", "option"), [choice for choice in CHOICES if choice != ("model", "hf")]
)
def test_every_option_composes_and_its_file_sets_what_it_says(group: str, option: str) -> None:
    composed = compose([f"{group}={option}"])
    assert composed.findings == ()
    set_by_it = [key for key in composed.layers if key.startswith(f"{group}.")]
    assert set_by_it
    kind = getattr(getattr(composed.config, group), "kind", None)
    if kind is not None and group in ("optimizer", "schedule", "launcher", "tokenizer", "data"):
        assert to_plain(kind) == option


@pytest.mark.parametrize("group", PROMISED)
def test_a_group_has_the_options_that_were_promised(group: str) -> None:
    assert {info.name for info in list_options(group)} == set(PROMISED[group].split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_key_is_commented(path: Path) -> None:
    assert leading_comment(path), "no comment at the top"
    for line in path.read_text().splitlines():
        assert len(line) <= 100
        is_section = line.rstrip().endswith(":")
        if line.strip() and not line.startswith("#") and not is_section and "_self_" not in line:
            assert "#" in line, line


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    assert parameters(compose([f"model={name}"]).config.model) == PUBLISHED[name]


def parameters(model: ModelConfig) -> int:
    """Parameters of a decoder, counted by hand from its architecture."""
    hidden, layers, width = model.hidden_size, model.num_layers, model.intermediate_size
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    if model.family == "gpt2":
        block = 4 * hidden * hidden + 2 * hidden * width + 9 * hidden + width
        norms = 2 * hidden
        assert width == 4 * hidden
        return embeddings + model.max_position_embeddings * hidden + layers * block + norms
    assert model.head_dim is not None and model.num_key_value_heads is not None
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    norms = 2 * hidden + (2 * model.head_dim if model.family == "qwen3" else 0)
    return embeddings + layers * (attention + 3 * hidden * width + norms) + hidden


def _peak(hardware: HardwareConfig, name: str) -> float | None:
    peak: float | None = getattr(hardware, f"peak_tflops_{name}")
    return peak


@pytest.mark.parametrize("name", [info.name for info in list_options("hardware")])
def test_peak_rates_name_their_source_and_are_dense(name: str) -> None:
    hardware = compose([f"hardware={name}"]).config.hardware
    rates = {item: _peak(hardware, item.name) for item in DataType}
    path = shipped_root() / "conf" / "hardware" / f"{name}.yaml"
    assert any(rates.values()) is any("Peak rates: " in line for line in leading_comment(path))
    # Each halving of the width at most doubles the rate (a figure with sparsity would be fourfold);
    # fp32 has no matrix unit to itself.
    bf16, fp8 = rates[DataType.bf16], rates[DataType.fp8]
    assert bf16 is None or bf16 == rates[DataType.fp16]
    assert bf16 is None or fp8 is None or fp8 == pytest.approx(2 * bf16, rel=1e-3)


@pytest.mark.parametrize("name", [info.name for info in list_options("hardware")])
def test_hardware_is_counted_one_unless_written_otherwise(name: str) -> None:
    hardware = compose([f"hardware={name}"]).config.hardware
    assert hardware.name == name
    assert hardware.nodes == 1
    assert hardware.devices_per_node == (None if name == "auto" else 1)
    if hardware.accelerator in (Accelerator.cuda, Accelerator.rocm):
        assert hardware.driver_names
        has_peak = {item.name: _peak(hardware, item.name) is not None for item in DataType}
        assert has_peak["fp32"] and has_peak["fp16"]
        assert has_peak["bf16"] is hardware.supports_bf16
        assert has_peak["fp8"] is hardware.supports_fp8
    gigabytes = name.rpartition("-")[2].removesuffix("g")
    if gigabytes.isdigit():
        assert hardware.device_memory_bytes is not None
        # What a driver reports lies near the nominal size; ECC and firmware take a share.
        assert 0.93 < hardware.device_memory_bytes / (int(gigabytes) * 2**30) <= 1.0
