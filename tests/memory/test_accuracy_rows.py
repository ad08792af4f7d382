"""Rows that nobody wrote yet: each becomes a plan, or is named with the reason why not.

`scripts/benchmarks/memory_accuracy.py` takes any CSV with the columns of the published
measurements, whose texts are free. A figure compared with the wrong one is worse than none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accuracy_rows import ALONE, LLAMA, MEGATRON, TITAN, load, rows

GIB = 2**30


@pytest.fixture(scope="module")
def accuracy() -> Any:
    return load()


def outcome(accuracy: Any, folder: Path, text: dict[str, str]) -> Any:
    """Return a row's estimate in GiB, its verdict, or the reason why there is neither."""
    found = accuracy.report(rows(accuracy, folder, text))
    if found.refused:
        return found.refused[0][1]
    if found.verdicts:
        return found.verdicts[0][0].metric.value
    return found.scored[0].estimates["trainctl"] / GIB


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("max_memory_allocated", "peak"),
        ("max_memory_allocated after training", "peak"),
        ("max_active_gib", "peak"),
        ("peak memory (GiB)", "peak"),
        ("mem-max-allocated-bytes", "peak"),
        ("max_memory_reserved (max over ranks)", "reserved"),
        ("max_reserved_gib", "reserved"),
        ("mem-allocated-bytes", "after_step"),
        ("allocated after the first step", "after_step"),
        ("nvidia-smi, max node", "driver"),
        ("peak VRAM", "driver"),
        ("GPU memory used", "driver"),
        ("no OOM", "fits"),
        ("ran without out of memory", "fits"),
        ("CUDA out of memory", "out_of_memory"),
        ("OOM", "out_of_memory"),
        ("did not fit", "out_of_memory"),
        ("peak, max headroom excluded", "peak"),
    ],
)
def test_a_metric_is_recognized_by_its_words(
    metric: str, kind: str, accuracy: Any, tmp_path: Path
) -> None:
    (row,) = rows(accuracy, tmp_path, LLAMA | {"metric": metric})
    assert row.metric is accuracy.Metric[kind]


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("host memory (RSS)", "host memory"),
        ("CPU RAM peak", "host memory"),
        ("peak system memory", "host memory"),
        ("checkpoint size", "on disk"),
        ("memory saved", "difference"),
        ("peak VRAM delta", "difference"),
        ("allocated after init", "moment"),
        ("memory after model load", "moment"),
        ("allocated after forward", "moment"),
        ("activation memory", "one part"),
        ("model states only", "one part"),
        ("optimizer states", "one part"),
        ("tokens/s", "not known"),
        ("", "not given"),
    ],
)
def test_another_figure_is_not_scored_as_a_peak(
    metric: str, reason: str, accuracy: Any, tmp_path: Path
) -> None:
    assert reason in outcome(accuracy, tmp_path, LLAMA | {"metric": metric})


@pytest.mark.parametrize(
    ("value", "unit", "given", "expected"),
    [
        ("40", "GiB", "", 40 * GIB),
        ("40", "GB", "", 40 * GIB),
        ("40", "GB(10^9)", "", 40e9),
        ("40", "GB (1e9)", "", 40e9),
        ("40", "GB (decimal)", "", 40e9),
        ("40,123", "MiB", "", 40_123 * 2**20),
        ("40123", "MB(10^6)", "", 40_123e6),
        ("18198419456", "bytes", "", 18_198_419_456),
        ("1e6", "KiB", "", 1e6 * 1024),
        ("0.5", "TB", "", 2**39),
        ("~40", "GiB", "", 40 * GIB),
        ("40.1 ± 0.2", "GiB", "", 40.1 * GIB),
        ("40 GB", "", "", 40 * GIB),
        ("40", "GiB", "37.25", 37.25 * GIB),
        ("40", "GiB", "n/a", 40 * GIB),
        ("38-40", "GiB", "", "no single positive number"),
        ("<40", "GiB", "", "no single positive number"),
        ("", "GiB", "", "no single positive number"),
        ("nan", "GiB", "", "no single positive number"),
        ("0", "GiB", "", "no single positive number"),
        ("74", "%", "", "no number of bytes"),
        ("40", "", "", "no number of bytes"),
    ],
)
def test_a_value_is_read_with_its_unit_or_named(
    value: str, unit: str, given: str, expected: float | str, accuracy: Any, tmp_path: Path
) -> None:
    text = LLAMA | {"value": value, "unit": unit, "value_gib": given}
    (row,) = rows(accuracy, tmp_path, text)
    if isinstance(expected, str):
        assert expected in row.unread
        assert expected in outcome(accuracy, tmp_path, text)
    else:
        assert row.measured == pytest.approx(expected)


# One row stands for what each setting changes: a column's text, a base, and a text that means the
# same or takes clearly less than the base.
GPT2 = LLAMA | {
    "model": "gpt2-xl",
    "params_b": "1.558",
    "layers": "48",
    "hidden": "1600",
    "heads": "25",
    "kv_heads": "25",
    "ffn": "6400",
    "vocab": "50257",
    "seq_len": "1024",
    "micro_batch": "8",
    "precision": "fp16",
    "attention": "eager",
}
OPT = GPT2 | {"model": "opt-1.3b", "ac_mode": "none", "params_b": ""}
SAME = [
    (LLAMA, {"seq_len": "8k"}),
    (LLAMA, {"seq_len": "8192 (packed)"}),
    (LLAMA, {"params_b": "~8B"}),
    (LLAMA, {"micro_batch": ""}),
    (LLAMA, {"precision": ""}),
    (MEGATRON, {"precision": ""}),
    (LLAMA, {"precision": "bfloat16 mixed"}),
    (LLAMA, {"ac_mode": "True"}),
    (LLAMA, {"ac_mode": "every block"}),
    (LLAMA, {"attention": "FA3", "compile": "n/a", "cp_sp": "SP=TP"}),
    (LLAMA, {"sharding": "zero3", "framework": "axolotl"}),
    (LLAMA, {"dp": "", "world_gpus": ""}),
    (LLAMA, dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")),
    (LLAMA, {"model": "meta-llama/Meta-Llama-3-8B-Instruct", "heads": "", "hidden": ""}),
    (TITAN, {"sharding": "FSDP2 (ZeRO-3)"}),
    (TITAN, {"sharding": ""}),
    (TITAN, {"ac_mode": "selective"}),
    (ALONE, {"dp": "", "tp": "", "pp": ""}),
    (MEGATRON, {"vocab": "tokenizer: GPT2BPE (128256 padded to 128*tp)"}),
    (TITAN, {"sharding": "FSDP2 (ZeRO-3 equiv), fp32 sharded params"}),
    (TITAN, {"ac_mode": "selective op (saves every 2nd mm + SDPA)"}),
    (TITAN, {"ac_mode": "per toml at e7c0cae", "caveat": "AC from llama3_8b.toml"}),
    (LLAMA | {"framework": "Lightning"}, {"caveat": "reduce_bucket_size=2e8"}),
]
LESS = [
    (LLAMA, {"optimizer": "Lion"}),
    (LLAMA, {"optimizer": "SGD"}),
    (LLAMA, {"optimizer": "AdamW8bit (bitsandbytes)"}),
    (TITAN, {"optimizer": "Adafactor"}),
    (LLAMA, {"optimizer": "Muon"}),
    (LLAMA, {"precision": "bf16 (no master)"}),
    (LLAMA, {"loss": "fused linear cross entropy"}),
    (LLAMA, {"compile": "torch.compile"}),
    (LLAMA, {"cp_sp": "Ulysses SP 4", "dp": "2"}),
    (LLAMA, {"ac_mode": "full, CPU offloaded"}),
    (LLAMA, {"offload": "ZeRO-Offload"}),
    (LLAMA | {"precision": "fp32"}, {"precision": "float16"}),
    (LLAMA | {"attention": "eager"}, {"attention": "sdpa"}),
    (LLAMA | {"metric": "reserved", "gpu": "H200"}, {"gpu": "RTX 4090"}),
    (TITAN, {"optimizer": "Lion"}),
    (TITAN, {"precision": "bf16-true"}),
    (TITAN, {"offload": "CPU (params, optimizer)"}),
    (TITAN, {"compile": "model"}),
    (TITAN, {"compile": "per block"}),
    (TITAN | {"compile": "per block"}, {"compile": "model"}),
    (OPT, {"caveat": "dropout 0"}),
    (OPT, {"precision": "bf16"}),
    (GPT2 | {"loss": "CrossEntropyLoss"}, {"loss": "CrossEntropyLoss with shift copy"}),
    (TITAN | {"sharding": "FSDP2 ZeRO-2"}, {"sharding": "FSDP2 ZeRO-3"}),
    (TITAN | {"sharding": "HSDP (2 replicate x 4 shard)"}, {"sharding": "FSDP2"}),
    (MEGATRON, {"precision": "fp16"}),
    (MEGATRON | {"ac_mode": "none"}, {"cp_sp": "SP"}),
    (MEGATRON | {"attention": "unfused", "ac_mode": "none"}, {"ac_mode": "selective (core)"}),
    (ALONE, {"optimizer": "adamw_bnb_8bit"}),
    (ALONE, {"precision": "bf16 without fp32 master"}),
    (ALONE | {"optimizer": "AdamW (foreach)"}, {"optimizer": "AdamW (fused)"}),
]


def name(case: Any) -> str:
    return "-".join(f"{key}={text}" for key, text in case.items() if text != LLAMA.get(key))


@pytest.mark.parametrize(("base", "change"), SAME, ids=name)
def test_another_way_to_say_the_same(
    base: dict[str, str], change: dict[str, str], accuracy: Any, tmp_path: Path
) -> None:
    before, after = (outcome(accuracy, tmp_path, text) for text in (base, base | change))
    assert after == before


@pytest.mark.parametrize(("base", "change"), LESS, ids=name)
def test_what_a_row_says_is_in_its_plan(
    base: dict[str, str], change: dict[str, str], accuracy: Any, tmp_path: Path
) -> None:
    before, after = (outcome(accuracy, tmp_path, text) for text in (base, base | change))
    assert after < 0.99 * before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (ALONE | {"precision": ""}, "precision is not given"),
        ({"precision": "int8"}, "no term"),
        ({"optimizer": "none (forward only)"}, "nothing learns"),
        ({"optimizer": "Shampoo"}, "no term for its states"),
        ({"sharding": ""}, "sharding is not given"),
        ({"sharding": "Gemini", "framework": "ColossalAI"}, "no term"),
        ({"sharding": "magic"}, "is not known"),
        ({"framework": "MaxText (JAX)"}, "torch's allocator"),
        ({"gpu": "TPU v4"}, "no CUDA allocator"),
        ({"ac_mode": "memory budget 0.5"}, "does not say what is recomputed"),
        ({"ac_mode": "none", "offload": "activations->CPU"}, "not recomputed"),
        ({"offload": "NVMe"}, "does not say of what"),
        ({"loss": "DPO"}, "no cross entropy"),
        ({"caveat": "reward model: chosen + rejected"}, "no cross entropy"),
        ({"seq_len": "8192-16384"}, "seq_len is 8192-16384"),
        ({"micro_batch": "0.5"}, "no whole number"),
        ({"layers": "0"}, "layers is 0"),
        ({"heads": "31"}, "cannot be divided"),
        ({"params_b": "70"}, "the sizes give 8.03 billion"),
        ({"pp": "64", "world_gpus": "64", "dp": "1"}, "32 blocks on 64 pipeline stages"),
        ({"model": "qwen3-30b-a3b"}, "experts"),
        ({"model": "gpt-oss-20b"}, "experts"),
        ({"model": "T5-11B"}, "not a decoder"),
        ({"model": "mamba-2.8b"}, "not a decoder"),
        ({"framework": "Megatron-LM", "sharding": "ZeRO-2"}, "ZeRO-2"),
        (MEGATRON | {"precision": "fp8"}, "fp8"),
        (MEGATRON | {"pp": "2", "dp": "2"}, "which pipeline rank"),
        (MEGATRON | {"optimizer": "Muon"}, "Muon"),
        (MEGATRON | {"offload": "optimizer->CPU"}, "offloading"),
        (MEGATRON | {"ac_mode": "every 2 layers"}, "every 2"),
        (ALONE | {"offload": "optimizer->CPU"}, "without FSDP or ZeRO"),
    ],
    ids=lambda case: name(case) if isinstance(case, dict) else "",
)
def test_what_has_no_term_is_not_scored(
    change: dict[str, str], reason: str, accuracy: Any, tmp_path: Path
) -> None:
    assert reason in outcome(accuracy, tmp_path, LLAMA | change)


@pytest.mark.parametrize(
    ("gpu", "ran_out", "gib"),
    [
        ("8xA100-40", False, 40),
        ("NVIDIA A100-SXM4-80GB", False, 80),
        ("A100", False, 80),
        ("A100", True, 40),
        ("8xV100-16GB", False, 16),
        ("4 GB200", False, 186),
        ("H100 (95GB)", False, 95),
        ("MI300X", False, 192),
        ("RTX3090", False, 24),
        ("something new", False, None),
    ],
)
def test_a_device_is_known_by_its_name(
    gpu: str, ran_out: bool, gib: int | None, accuracy: Any, tmp_path: Path
) -> None:
    text = LLAMA | {"gpu": gpu, "value": "", "metric": "OOM" if ran_out else "fits"}
    (row,) = rows(accuracy, tmp_path, text)
    capacity = accuracy.case_of(row).plan.hardware.device_memory_bytes
    assert capacity == (None if gib is None else gib * GIB)


def test_a_named_model_is_what_it_is_in_megatron(accuracy: Any, tmp_path: Path) -> None:
    """Without the options of a test: Llama's gate, norms and two projections, with no biases."""
    (row,) = rows(accuracy, tmp_path, MEGATRON | {"tp": "1", "dp": "8"})
    held = accuracy.estimate(accuracy.case_of(row)).components
    assert held.parameters / 2 == pytest.approx(8_030_261_248, rel=1e-4)


def test_any_text_in_any_column_gives_a_figure_or_a_reason(accuracy: Any, tmp_path: Path) -> None:
    """No traceback, and no reason that is only the name of one."""
    words = ("", "0", "?", "n/a", "8", "1.5", "none", "yes", "CPU", "fp8", "MoE 8x7B", "a, b; c=2")
    made_up = [
        base | {"id": f"{column}={word}", column: word}
        for base in (LLAMA, TITAN, MEGATRON, ALONE)
        for column in base
        if column != "id"
        for word in words
    ]
    read = rows(accuracy, tmp_path, *made_up)
    found = accuracy.report(read)
    assert len(found.scored) + len(found.verdicts) + len(found.refused) == len(made_up)
    assert [reason for _, reason in found.refused if "could not be read" in reason] == []
    assert all(item.estimates["trainctl"] > 0 for item in found.scored)
