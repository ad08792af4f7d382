"""Where the elements of a parameter lie in published files, whose names are not those in memory.

transformers joins the matrices of all experts to one parameter as it loads them; published files
have one tensor for each expert. A parameter's elements are then those of its parts, one part after
the other, so that any range of it is read from the parts that it touches alone. A file may also
lack the name of the decoder before each of its own (`wte.weight` for `transformer.wte.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

DECODERS = ("model.", "transformer.")

EXPERTS = (
    ("{block}mlp.experts.{expert}.{part}_proj.weight", ("gate", "up"), ("down",)),
    ("{block}mlp.experts.{expert}.{part}.weight", ("w1", "w3"), ("w2",)),
    ("{block}block_sparse_moe.experts.{expert}.{part}.weight", ("w1", "w3"), ("w2",)),
)
"""Names of one expert's matrices: what is joined to `gate_up_proj`, and to `down_proj`."""

RENAMED = ((r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight"),)
"""Other parameters that published files call differently (mixtral's router)."""

_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor that holds consecutive elements of a parameter.

    Attributes:
        name: What it is called in the files.
        shape: That it must have there.
    """

    name: str
    shape: tuple[int, ...]


def parts_of(name: str, shape: Sequence[int], stored: Container[str]) -> tuple[StoredPart, ...]:
    """The stored tensors that make up a parameter, in the order of its elements.

    Args:
        name: Canonical name.
        shape: Of the parameter.
        stored: Names in the files.

    Returns:
        Nothing if the files do not have it. Shapes are not looked at.
    """
    for candidate in _names(name):
        if candidate in stored:
            return (StoredPart(candidate, tuple(shape)),)
    found = _FUSED.fullmatch(name)
    if found is None or len(shape) != 3:
        return ()
    block, kind = found.groups()
    experts, rows, columns = shape
    for pattern, joined, single in EXPERTS:
        parts = joined if kind == "gate_up_proj" else single
        names = [
            pattern.format(block=block, expert=expert, part=part)
            for expert in range(experts)
            for part in parts
        ]
        if names and all(one in stored for one in names):
            return tuple(StoredPart(one, (rows // len(parts), columns)) for one in names)
    return ()


def _names(name: str) -> Iterator[str]:
    """What files may call a parameter."""
    yield name
    for pattern, replacement in RENAMED:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            yield renamed
    for decoder in DECODERS:
        if name.startswith(decoder):
            yield name.removeprefix(decoder)
