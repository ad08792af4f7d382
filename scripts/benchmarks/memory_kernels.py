"""Measurements of a loss alone, compared with the budget's terms for the loss."""

from __future__ import annotations

import re

from memory_rows import NotExpressible, Row

from trainctl.memory import constants

ITERATIONS = 10
"""Liger-Kernel's benchmarks report the mean peak of ten iterations (benchmark/scripts/utils.py);
the first iteration has no earlier gradients.
"""
LATER = (ITERATIONS - 1) / ITERATIONS


def is_kernel(row: Row) -> bool:
    """Return True if a row measured a single operation instead of a training job."""
    return row.words("framework").startswith("kernel")


def kernel_bytes(row: Row) -> float:
    """Return the peak bytes of a cross entropy, with or without its projection, forward and
    backward.

    Raises:
        NotExpressible: The row measured another operation.
    """
    text = row.words("model", "id")
    if "ce" not in text and "cross" not in text:
        raise NotExpressible("an operation that the budget has no term for")
    liger = "liger" in row.words("metric", "loss").replace("no liger", "")
    if row["hidden"]:
        return _projected(row, liger=liger)
    vocabulary = re.search(r"v[=_-]?(\d+)", text)
    sizes = re.search(r"(\d+)\s*x\s*(\d+)", row["seq_len"])
    if not vocabulary or not sizes:
        raise NotExpressible("the size of the logits is not given")
    logits = int(vocabulary.group(1)) * int(sizes.group(1)) * int(sizes.group(2))
    if liger:
        return 4 * logits  # the gradient overwrites the input
    # fp32: input, log-softmax, gradients of loss and log-softmax, and the input's earlier gradient.
    return logits * (constants.LOGIT_BYTES[4].backward + 4 * LATER)


def _projected(row: Row, *, liger: bool) -> float:
    hidden, vocabulary = row.number("hidden"), row.number("vocab")
    tokens = row.number("seq_len") * row.number("micro_batch", 1)
    head = 2 * hidden * vocabulary  # the outputs of both compared implementations are alive
    inputs = 2 * tokens * hidden
    if liger:
        parts = -(-vocabulary // hidden)
        chunk = min(tokens, 1 << max(-(-tokens // parts) - 1, 0).bit_length())
        return head * (3 + LATER) + inputs * (2 + LATER) + 6 * chunk * vocabulary
    # 16-bit log-softmax and two gradients; no variable keeps the logits.
    return (
        head * (2 + LATER)
        + inputs * (1 + LATER)
        + 6 * tokens * vocabulary
        + constants.LIBRARY_WORKSPACE.usual
    )
