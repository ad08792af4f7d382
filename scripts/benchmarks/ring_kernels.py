"""Benchmark of the attention kernels of a ring on one GPU, beside attention to a whole sequence.

    python scripts/benchmarks/ring_kernels.py [CHUNK ...]

Times the turns of one context rank in bf16 with the heads of an 8B Llama: of its own keys (two
causal rectangles and a full one), and of another rank's (two full ones). Their rates, merging of
results included, stand beside those of the fused kernel on two chunks in one sequence. `hidden at`
is the rate in GB/s at which keys, and backward gradients in fp32 with them, must travel to arrive
within a turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from trainctl.engines.process import Axis
from trainctl.engines.ring_attention import Rectangles, Ring, rectangles_of

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
REPEATS = 10


def seconds(call: Callable[[], object]) -> float:
    """Return the mean seconds on the device after a first call."""
    call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPEATS):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000 / REPEATS


def row(chunk: int, name: str, turn: Rectangles) -> str:
    """Return the line of the turn of a rank with two chunks."""
    inputs = [
        torch.randn(1, heads, 2 * chunk, WIDTH, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    ring = Ring(Axis(0, (0,), None), "benchmark")
    ring.rectangles = turn
    saved = (*inputs, *ring.forward(*inputs, 0.1))
    forward = seconds(lambda: ring.forward(*inputs, 0.1))
    backward = seconds(lambda: ring.backward(turn, saved[0], saved, 0.1))
    whole = [each.clone().requires_grad_() for each in inputs]
    of_whole = seconds(
        lambda: F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    )
    output = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    of_backward = seconds(lambda: output.backward(inputs[0], retain_graph=True))
    flops = 4 * HEADS * WIDTH * 2 * chunk**2  # of two full rectangles, and of the whole sequence
    pair = 2 * KEY_HEADS * WIDTH * 2 * chunk
    rates = (flops / forward, 2.5 * flops / backward, flops / of_whole, 2.5 * flops / of_backward)
    cells = [f"{rate / 1e12:.0f}" for rate in rates]
    cells += [f"{pair * 2 / forward / 1e9:.0f}", f"{pair * 6 / backward / 1e9:.0f}"]
    return f"| {chunk:,} | {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| chunk | keys | forward, TFLOP/s | backward | whole, forward | backward |", end="")
    print(" hidden at, forward | backward |\n|---|---|---|---|---|---|---|---|")
    for chunk in map(int, sys.argv[1:] or CHUNKS):
        own, others = rectangles_of(1, 2, 4 * chunk)
        print(row(chunk, "own", (own,)), row(chunk, "another's", (others,)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
