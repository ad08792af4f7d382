"""The recipe `tiny` of a folder of its own, so small that commands of a page take seconds."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
SMALLER = {
    "sequence_length: 256": "sequence_length: 32\n  evaluation_samples: 4",
    "global_batch_size: 16": "global_batch_size: 8",
    "sample_tokens: 64": "sample_tokens: 8",
}
MODEL = "\nmodel: {num_layers: 2, hidden_size: 32, head_dim: 8, intermediate_size: 64}\n"
DATA = "data: {max_bytes: 1000000}\n"


def write_small_tiny(folder: Path, *, steps: int = 160, model: str = MODEL) -> None:
    """Write `recipes/tiny.yaml`, which commands in the folder find before the shipped one.

    Args:
        model: Section of the model, or nothing for one without these keys.
    """
    text = SHIPPED.read_text()
    for old, new in {**SMALLER, "  steps: 160": f"  steps: {steps}"}.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / "recipes" / "tiny.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{text}{model}{DATA}")
