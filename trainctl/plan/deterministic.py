"""Environment variables of `training.deterministic`, which every rank starts with.

The settings of torch are in `trainctl.engines.process`. docs/resume.md describes the cost.
"""

from __future__ import annotations

VARIABLES = {
    # One of two workspace sizes that make cuBLAS reproducible; read when CUDA starts.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # FlashAttention's backward pass without atomic sums (modeling_flash_attention_utils.py).
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # torch.compile chooses kernels by rules, not by measured times (torch/_inductor/config.py).
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
