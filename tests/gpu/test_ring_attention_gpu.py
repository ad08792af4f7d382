"""Ring attention with the fused kernels of a GPU, by ranks that share it."""

from __future__ import annotations

import socket

import pytest
import ring_probe
import torch


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "is_masked"), [(1, True), (2, False), (3, True)])
def test_attention_and_gradients_are_those_of_the_whole_sequence(
    ranks: int, is_masked: bool
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not forked: a process that has imported torch for CUDA has threads.
    torch.multiprocessing.spawn(ring_probe.check_on_gpu, (ranks, is_masked, port), ranks)
