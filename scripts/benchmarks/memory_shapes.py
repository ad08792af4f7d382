"""Shapes of public models, for rows that name a model and leave its sizes out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memory_rows import Row


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks, width, query heads, key and value heads, feed-forward width and vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


PUBLISHED = (
    (r"llama-?3\.2-1b", Shape(16, 2048, 32, 8, 8192, 128_256)),
    (r"llama-?3\.2-3b", Shape(28, 3072, 24, 8, 8192, 128_256)),
    (r"llama-?3(\.\d)?-8b", Shape(32, 4096, 32, 8, 14_336, 128_256)),
    (r"llama-?3(\.\d)?-70b", Shape(80, 8192, 64, 8, 28_672, 128_256)),
    (r"llama-?3(\.\d)?-405b", Shape(126, 16_384, 128, 8, 53_248, 128_256)),
    (r"llama-?[12]?-7b", Shape(32, 4096, 32, 32, 11_008, 32_000)),
    (r"llama-?[12]?-13b", Shape(40, 5120, 40, 40, 13_824, 32_000)),
    (r"llama-?1?-(30|33)b", Shape(60, 6656, 52, 52, 17_920, 32_000)),
    (r"llama-?1?-65b", Shape(80, 8192, 64, 64, 22_016, 32_000)),
    (r"llama-?2-70b", Shape(80, 8192, 64, 8, 28_672, 32_000)),
    (r"tinyllama(-1\.1b)?", Shape(22, 2048, 32, 4, 5632, 32_000)),
    (r"mistral-7b", Shape(32, 4096, 32, 8, 14_336, 32_000)),
    (r"qwen2(\.5)?-0\.5b", Shape(24, 896, 14, 2, 4864, 151_936)),
    (r"qwen2(\.5)?-1\.5b", Shape(28, 1536, 12, 2, 8960, 151_936)),
    (r"qwen2\.5-3b", Shape(36, 2048, 16, 2, 11_008, 151_936)),
    (r"qwen2(\.5)?-7b", Shape(28, 3584, 28, 4, 18_944, 152_064)),
    (r"qwen2\.5-14b", Shape(48, 5120, 40, 8, 13_824, 152_064)),
    (r"qwen2\.5-32b", Shape(64, 5120, 40, 8, 27_648, 152_064)),
    (r"qwen2(\.5)?-72b", Shape(80, 8192, 64, 8, 29_568, 152_064)),
    (r"qwen3-0\.6b", Shape(28, 1024, 16, 8, 3072, 151_936)),
    (r"qwen3-1\.7b", Shape(28, 2048, 16, 8, 6144, 151_936)),
    (r"qwen3-4b", Shape(36, 2560, 32, 8, 9728, 151_936)),
    (r"qwen3-8b", Shape(36, 4096, 32, 8, 12_288, 151_936)),
    (r"qwen3-14b", Shape(40, 5120, 40, 8, 17_408, 151_936)),
    (r"qwen3-32b", Shape(64, 5120, 64, 8, 25_600, 151_936)),
    (r"gpt-?2(-small|-124m)?$", Shape(12, 768, 12, 12, 3072, 50_257)),
    (r"gpt-?2-medium", Shape(24, 1024, 16, 16, 4096, 50_257)),
    (r"gpt-?2-large", Shape(36, 1280, 20, 20, 5120, 50_257)),
    (r"gpt-?2-xl", Shape(48, 1600, 25, 25, 6400, 50_257)),
)
"""Shapes from the models' published config.json."""

TIED = re.compile(r"llama-?3\.2|qwen(2|2\.5|3)-(0\.5|0\.6|1\.5|1\.7|3|4)b|gemma|gpt-?2")
"""Gated models with tied embeddings."""

QUERY_WIDTHS = ((r"qwen3", 128), (r"gemma-?\d?-?27b", 128), (r"gemma", 256), (r"mistral-nemo", 128))
"""Head width where it is not hidden size / number of heads."""


def with_published_shape(row: Row) -> Row:
    """Fill missing sizes of a row that names a public model."""
    if row["hidden"] and row["heads"] and row["layers"] and row["vocab"]:
        return row
    name = re.sub(r"[ _/]+", "-", row["model"].lower())
    name = re.sub(r"(-instruct|-base|-hf|-chat|-v\d(\.\d)?)+$", "", name)
    for pattern, shape in PUBLISHED:
        if re.search(rf"(^|-){pattern}$", name):
            sizes = {
                column: row[column] or str(getattr(shape, column))
                for column in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
            }
            return replace(row, text=row.text | sizes)
    return row
