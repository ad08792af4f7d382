"""Ring attention on real ranks, beside attention to the whole sequence on each of them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainctl.engines.micro_batch import SequencePart
from trainctl.engines.process import Axis
from trainctl.engines.ring_attention import Ring, _is_for_cudnn, rectangles_of

SAMPLES, HEADS, KEY_HEADS, WIDTH, CHUNK = 2, 4, 2, 16, 24


class Peak(TorchDispatchMode):
    """Largest bytes of the tensors that operations have made and that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._sizes = 0, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        found = function(*args, **(kwargs or {}))
        known, made = (
            {
                StorageWeakRef(each.untyped_storage()): each.untyped_storage().nbytes()
                for each in tree_leaves(tensors)
                if torch.is_tensor(each)
            }
            for tensors in ((args, kwargs), found)
        )
        self._sizes |= {ref: size for ref, size in made.items() if ref not in known}
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(self._sizes.values()))
        return found


class _RingThroughHost(Ring):
    """A ring whose ranks share a GPU, between which NCCL sends nothing: gloo does."""

    def _pass_on(self, tensor: torch.Tensor) -> Any:
        passing = super()._pass_on(tensor.cpu())
        wait = passing.wait
        passing.wait = lambda: wait().to(tensor.device)
        return passing


def compare(is_masked: bool, device: str = "cpu") -> tuple[float, int]:
    """Return the largest difference of outputs and gradients, and the peak of the backward pass.

    Documents begin at random tokens, the same on all ranks. On a GPU, whose fused kernels know only
    narrow formats, the ring is in bf16 and the attention beside it in fp32.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    length = 2 * CHUNK * ranks
    whole = [
        torch.randn(SAMPLES, heads, length, WIDTH).to(device).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    gradient = torch.randn(whole[0].shape).to(device)
    begins = torch.rand(SAMPLES, length) < 0.06
    begins[:, 0] = True
    documents = begins.cumsum(1) if is_masked else torch.ones_like(begins)
    sees = (documents[:, None, :, None] == documents[:, None, None, :]).tril().to(device)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=sees, scale=0.3, enable_gqa=True)
    expected.backward(gradient)

    part = SequencePart(context_index=rank, context_count=ranks)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return part.of(tensor.transpose(1, 2)).transpose(1, 2)

    make, format = (Ring, torch.float32) if device == "cpu" else (_RingThroughHost, torch.bfloat16)
    ring = make(Axis(rank, tuple(range(ranks)), dist.group.WORLD), "test")
    ring.rectangles = rectangles_of(rank, ranks, length, begins if is_masked else None)
    mine = [own(each.detach()).to(format, copy=True).requires_grad_() for each in whole]
    if device != "cpu" and torch.cuda.get_device_capability() >= (9, 0):
        assert _is_for_cudnn(ring.rectangles[0][0], *mine) != is_masked
    output = ring.attend(*mine, 0.3)
    of_output = own(gradient).to(format)
    with Peak() as peak:
        output.backward(of_output)
    pairs = [(output, own(expected))]
    pairs += [(each.grad, own(of.grad)) for each, of in zip(mine, whole, strict=True)]
    worst = max(float((found - wanted).detach().abs().max()) for found, wanted in pairs)
    dist.destroy_process_group()
    return worst, peak.bytes


def check_on_gpu(rank: int, ranks: int, is_masked: bool, port: int) -> None:
    """Fail if a rank of those that share a GPU finds more than the rounding of bf16."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert compare(is_masked, "cuda")[0] < 0.05
