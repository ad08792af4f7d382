"""Summary of a profiler trace: classes, gaps, synchronizations and launches of known events."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule

from trainctl.train.callbacks.trace_summary import classify, read_trace, render, summarize

HOST, BACKWARD, STREAM = (1, 1), (1, 2), (0, 7)
STEP_US = 1000


class Trace:
    """Events of two steps of a millisecond each, as torch exports them for a GPU."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def add(self, name: str, category: str, ts: float, dur: float, thread: Any = HOST) -> Trace:
        where = {"pid": thread[0], "tid": thread[1]}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": {}, **where}
        )
        return self

    def launch(
        self, kernel: str, at: float, begins: float, dur: float, thread: Any = HOST, call: str = ""
    ) -> None:
        """Add a call of 2 us that launches a kernel."""
        self._correlation += 1
        category = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
        self.add(call or "cudaLaunchKernel", "cuda_runtime", at, 2, thread)
        self.add(kernel, category, begins, dur, STREAM)
        for event in self.events[-2:]:
            event["args"]["correlation"] = self._correlation


def made() -> list[dict[str, Any]]:
    trace = Trace()
    for number in range(2):
        at = 5e12 + number * STEP_US
        trace.add(f"ProfilerStep#{number}", "user_annotation", at, STEP_US)
        trace.add("aten::linear", "cpu_op", at + 1, 20).add("aten::mm", "cpu_op", at + 2, 10)
        trace.launch("nvjet_hsh_128x256_64x4_TNT", at + 3, at + 10, 200)
        flash = "aten::_scaled_dot_product_flash_attention"
        trace.add(flash, "cpu_op", at + 30, 20)
        # A template of cutlass is no product here.
        trace.launch("void flash_fwd_kernel<cutlass::bfloat16>", at + 32, at + 210, 50)
        trace.add("aten::_log_softmax", "cpu_op", at + 60, 10)
        trace.launch("cunn_SoftMaxForward<8, float>", at + 62, at + 260, 40)
        trace.add("MulBackward0", "cpu_op", at + 80, 10, BACKWARD)
        trace.launch("vectorized_elementwise_kernel<4>", at + 82, at + 300, 100, BACKWARD)
        # The host does nothing that is recorded for 300 us: the GPU is idle from 400 to 700.
        trace.add("Optimizer.step#AdamW.step", "user_annotation", at + 690, 50)
        trace.add("aten::_fused_adamw_", "cpu_op", at + 695, 40)
        trace.launch("multi_tensor_apply_kernel<Functor>", at + 697, at + 700, 80)
        trace.add("nccl:all_gather", "user_annotation", at + 750, 10)
        trace.launch("Memcpy DtoD", at + 752, at + 780, 20, call="cudaMemcpyAsync")
        trace.add("aten::item", "cpu_op", at + 800, 150)
        trace.launch("Memcpy DtoH (Device -> Pageable)", at + 801, at + 805, 5, HOST, "cudaMemcpy")
        trace.add("cudaStreamSynchronize", "cuda_runtime", at + 810, 130)
    trace.events.append({"ph": "M", "name": "process_name", "args": {"name": "python"}})
    trace.events.append({"ph": "s", "cat": "ac2g", "ts": 5e12, "id": 1})
    return trace.events


def test_time_is_split_by_the_kernel_and_by_what_launched_it() -> None:
    summary = summarize(made(), steps=2)
    assert summary.has_device and summary.ms == pytest.approx(1.0)
    assert summary.classes == {
        "products": pytest.approx(0.2),
        "elementwise": pytest.approx(0.1),
        "optimizer": pytest.approx(0.08),
        "attention": pytest.approx(0.05),
        "cross entropy": pytest.approx(0.04),
        "communication": pytest.approx(0.02),
        "copies": pytest.approx(0.005),
    }
    assert summary.top[0] == ("nvjet_hsh_128x256_64x4_TNT", "products", 1, pytest.approx(0.2))
    assert summary.attention == ["sdpa flash"]


def test_launches_synchronizations_and_copies_are_counted_with_their_caller() -> None:
    summary = summarize(made(), steps=2)
    assert (summary.kernels, summary.launches) == (5, 5)
    waits = summary.synchronizations
    assert (waits.number, waits.ms) == (2, pytest.approx(0.132))  # cudaMemcpy waits, too
    assert summary.waiting_operations == {"aten::item": 2}
    copies = summary.copies_to_host
    assert (copies.number, copies.ms) == (1, pytest.approx(0.005))


def test_gaps_name_what_the_host_does() -> None:
    summary = summarize(made(), steps=2)
    # 10 us before the first kernel, 300 in Python, 5 before and 190 after the copy to the host.
    assert summary.busy == pytest.approx(0.495)
    (longest, python), _, (after, waiting), *_ = summary.gaps
    assert longest == pytest.approx(0.3)
    assert python == "Python after MulBackward0 before aten::_fused_adamw_"
    assert after == pytest.approx(0.2)  # up to the next step's first kernel
    assert waiting == "cudaStreamSynchronize in aten::item"


def test_the_text_has_every_part() -> None:
    text = render(summarize(made(), steps=2))
    assert "1.0 ms a step over 2 steps; the GPU is busy 50% of it" in text
    assert "attention: sdpa flash\n5 launches and 5 kernels a step" in text
    assert "2 synchronizations a step, 0.13 ms: aten::item 2" in text
    assert "      0.20  40%  products" in text
    assert "nvjet_hsh_128x256_64x4_TNT [products]" in text


@pytest.mark.parametrize(
    ("kernel", "around", "expected"),
    [
        ("void flash_fwd_kernel<cutlass::bfloat16>", [], "attention"),
        ("sm90_xmma_gemm_bf16bf16", [], "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", [], "attention"),
        ("void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm>", [], "products"),
        ("sm80_xmma_gemm", ["aten::bmm", "aten::_scaled_dot_product_attention_math"], "attention"),
        ("triton_red_fused__log_softmax_nll_loss_forward_1", [], "cross entropy"),
        ("liger_cross_entropy_kernel", ["LigerFusedLinearCrossEntropyFunction"], "cross entropy"),
        ("nvjet_tst", ["LigerFusedLinearCrossEntropyFunction"], "products"),
        ("_rms_norm_forward_kernel", ["LigerRMSNormFunction"], "elementwise"),
        ("reduce_kernel<512>", ["aten::linalg_vector_norm"], "elementwise"),
        ("multi_tensor_apply_kernel", ["aten::_foreach_norm"], "optimizer"),
        ("ncclDevKernel_AllReduce", ["Optimizer.step#AdamW.step"], "communication"),
        ("triton_poi_fused_mul_silu_3", ["Torch-Compiled Region: 0/0"], "elementwise"),
        ("triton_tem_fused_mm_7", [], "products"),
    ],
)
def test_kernels_have_classes(kernel: str, around: list[str], expected: str) -> None:
    assert classify(kernel, around) == expected


def test_a_trace_of_a_cpu_counts_each_operation_s_own_time(tmp_path: Path) -> None:
    layer = torch.nn.Linear(64, 64)
    update = torch.optim.AdamW(layer.parameters())
    path = tmp_path / "trace.json.gz"
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
    ) as running:
        for _ in range(3):
            q = layer(torch.randn(8, 64)).view(1, 2, 4, 64)
            out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            functional.cross_entropy(out.view(8, 64), torch.zeros(8, dtype=torch.long)).backward()
            update.step()
            update.zero_grad()
            running.step()
    summary = summarize(read_trace(path), steps=2)
    assert not summary.has_device and summary.launches == 0
    assert {"products", "attention", "cross entropy", "optimizer"} <= set(summary.classes)
    assert summary.attention == ["sdpa flash"]
    # A parent's time is not counted again, so all classes together fit into the step.
    assert 0 < sum(summary.classes.values()) <= summary.ms * 1.001
    assert summary.busy == pytest.approx(sum(summary.classes.values()) / summary.ms, rel=0.05)
    assert "no GPU in the trace" in render(summary)


def test_a_trace_without_steps_is_summarized_and_a_broken_one_refused(tmp_path: Path) -> None:
    assert "0.0 ms a step" in render(summarize([], steps=1))
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": None}).encode()))
    with pytest.raises(ValueError, match="no list of events"):
        read_trace(path)


def test_it_is_read_without_torch() -> None:
    code = "import sys, trainctl.train.callbacks.trace_summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
