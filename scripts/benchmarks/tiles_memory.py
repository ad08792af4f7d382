"""Peak memory of a step with tiled feed-forward layers and a chunked loss, as ratios.

A Llama of four blocks runs forward and backward on one CPU process. Each setting runs in a process
of its own; the result is the peak resident size in excess of that before the step:

    python scripts/benchmarks/tiles_memory.py --tokens 8192 --tiles 8
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

SETTINGS = {
    "plain": {"tiles": False, "chunks": False, "recomputed": False},
    "tiles": {"tiles": True, "chunks": False, "recomputed": False},
    "tiles and chunks": {"tiles": True, "chunks": True, "recomputed": False},
    "recomputed": {"tiles": False, "chunks": False, "recomputed": True},
    "recomputed, tiles": {"tiles": True, "chunks": False, "recomputed": True},
    "recomputed, tiles and chunks": {"tiles": True, "chunks": True, "recomputed": True},
}


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tiles", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--one", help="measure this setting in this process")
    options = parser.parse_args()
    if options.one is not None:
        print(*measure(options))
        return
    first: dict[bool, float] = {}
    for name, setting in SETTINGS.items():
        ended = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", name],
            check=True,
            capture_output=True,
            text=True,
        )
        mib, seconds = map(float, ended.stdout.splitlines()[-1].split())
        ratio = mib / first.setdefault(setting["recomputed"], mib)
        print(f"{name:30} {mib:8.0f} MiB {ratio:6.2f} {seconds:7.1f} s of CPU", flush=True)


def measure(options: argparse.Namespace) -> tuple[float, float]:
    """Return the MiB that one step adds to the process at its peak, and its CPU seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainctl.config.registry import new_section
    from trainctl.config.schema import CrossEntropyKind, KernelsConfig
    from trainctl.train.models.kernels import tile_feed_forward
    from trainctl.train.models.recompute import wrap_blocks
    from trainctl.train.objectives.loss import LanguageModel

    setting, width = SETTINGS[options.one], options.width
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32 * width,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=4,
            num_attention_heads=width // 64,
            max_position_embeddings=options.tokens,
        )
    ).train()
    if setting["recomputed"]:
        wrap_blocks(model, new_section("activation_checkpointing", "full"))
    if setting["tiles"]:
        tile_feed_forward(model, options.tiles)
    kind = CrossEntropyKind.chunked if setting["chunks"] else CrossEntropyKind.plain
    whole = LanguageModel(model, None, KernelsConfig(cross_entropy=kind, chunk_tokens=512))

    def step(length: int) -> None:
        ids = torch.zeros(1, length, dtype=torch.long)
        whole({"input_ids": ids, "use_cache": False}, ids).backward()

    step(64)  # allocates gradients and other one-time buffers
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    step(options.tokens)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_maxrss - before.ru_maxrss) / 1024, time.process_time() - started


if __name__ == "__main__":
    main()
