"""Which blocks a pipeline stage holds, and the tensors on one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainctl.config.anatomy import Anatomy, Parameter, Role
from trainctl.config.schema import ModelConfig
from trainctl.memory.activations import BlockActivations
from trainctl.memory.trainable import Learning
from trainctl.plan import shapes
from trainctl.plan.shapes import TensorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tensors of one size on one rank."""

    numel: int
    """Elements on this rank, after tensor parallelism."""
    count: int
    """How many there are."""
    is_matrix: bool
    """Whether the tensor has two dimensions."""
    in_block: bool
    """Whether it belongs to a decoder block."""
    embedding: bool
    """Whether it is an embedding (or a projection tied to one)."""
    factors: int = 0
    """Rows and columns of a matrix, elements of a vector: what adafactor keeps of it."""
    name: str = ""
    """Canonical name, relative to the block where there are several; empty if it has none."""
    is_expert: bool = False
    """Whether only some tokens meet it: what `parallelism.expert` divides."""
    spread: int = 1
    """Ranks that have a part of the whole tensor each, besides tensor ranks: as many times fewer
    share out this part."""
    trains: bool = True
    """Whether the optimizer updates it."""
    element_bytes: int | None = None
    """Bytes of one element, where it is not in the type that computes: a matrix in 8 or 4 bits is
    so many bytes."""
    expanded: int = 0
    """Elements of the matrix that such bytes stand for."""

    def bytes(self, elements: int, weight_bytes: int) -> int:
        """Of so many of its elements, where others' have `weight_bytes`."""
        each = weight_bytes if self.element_bytes is None else self.element_bytes
        return each * elements

    @property
    def total(self) -> int:
        return self.numel * self.count

    @property
    def partitioned(self) -> int:
        """Elements that ZeRO's ranks, all of a stage's replicas, share out."""
        return self.total * self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a rank of one pipeline stage holds."""

    index: int
    """Pipeline stage, from 0."""
    blocks: int
    has_embedding: bool
    """Whether it looks the tokens up."""
    has_head: bool
    """Whether it computes the logits and the loss."""
    embedding: int
    """Elements of the token embedding here, if any."""
    head: int
    """Elements of the output projection here, tied or not, if any."""
    pieces: tuple[Piece, ...]
    traced: BlockActivations | None = None
    """What one of its blocks keeps, where the model was traced."""
    first_block: int = 0
    """Index of its first block in the model."""
    learning: tuple[tuple[Learning, int], ...] | None = None
    """What learns in the blocks that gradients reach, and in how many; none is all of each
    (`trainctl.memory.partial`)."""

    @property
    def trained(self) -> Stage:
        """The stage as its optimizer has it: without the tensors that are frozen."""
        if self.learning is None:
            return self
        tables = {self.embedding, self.head}  # learned positions are none
        embeddings = [p for p in self.pieces if p.embedding and p.numel in tables]
        heads = [p for p in self.pieces if p.is_matrix and not (p.in_block or p.embedding)]
        return replace(
            self,
            pieces=tuple(piece for piece in self.pieces if piece.trains),
            embedding=self.embedding if any(piece.trains for piece in embeddings) else 0,
            head=self.head if any(piece.trains for piece in heads or embeddings) else 0,
        )

    @property
    def final_norm_trains(self) -> bool:
        return any(
            piece.trains and not (piece.is_matrix or piece.in_block) for piece in self.pieces
        )

    @property
    def parameters(self) -> int:
        return sum(piece.total for piece in self.pieces)

    @property
    def weights(self) -> int:
        """What `parameters` says, of matrices in 8 or 4 bits what they stand for."""
        return sum((piece.expanded or piece.numel) * piece.count for piece in self.pieces)

    @property
    def tensors(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def partitioned(self) -> int:
        """Elements that ZeRO's ranks share out: with experts that other ranks have."""
        return sum(piece.partitioned for piece in self.pieces)

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max((piece.numel for piece in self.pieces), default=0)

    @property
    def largest_in_block(self) -> int:
        return max((piece.numel for piece in self.pieces if piece.in_block), default=0)

    @property
    def expert_parameters(self) -> int:
        """Elements of the experts, which only some tokens meet."""
        return sum(piece.total for piece in self.pieces if piece.is_expert)

    @property
    def block_parameters(self) -> int:
        """Elements of one block."""
        return sum(piece.total for piece in self.pieces if piece.in_block) // max(self.blocks, 1)

    @property
    def largest_expanded(self) -> int:
        """Elements of the largest matrix that is expanded from 8 or 4 bits."""
        return max((piece.expanded for piece in self.pieces), default=0)

    def bytes(self, weight_bytes: int) -> int:
        """Of all parameters; those in the type that computes have `weight_bytes` an element."""
        return sum(piece.bytes(piece.total, weight_bytes) for piece in self.pieces)

    def partitioned_bytes(self, weight_bytes: int) -> int:
        """Of what ZeRO's ranks share out."""
        return sum(piece.bytes(piece.partitioned, weight_bytes) for piece in self.pieces)

    def block_bytes(self, weight_bytes: int) -> int:
        """Of one block."""
        inside = (piece for piece in self.pieces if piece.in_block)
        size = sum(piece.bytes(piece.total, weight_bytes) for piece in inside)
        return size // max(self.blocks, 1)

    def bytes_below(self, threshold: int, weight_bytes: int) -> int:
        """Of tensors of at most `threshold` elements."""
        small = (piece for piece in self.pieces if piece.numel <= threshold)
        return sum(piece.bytes(piece.total, weight_bytes) for piece in small)


def stages(
    model: ModelConfig, *, tensor: int = 1, expert: int = 1, stage_blocks: Sequence[int] = ()
) -> tuple[Stage, ...]:
    """Return the stages of a pipeline, the embedding on the first, the head on the last.

    A head tied to the embedding is held by both when the pipeline has more than one stage.

    Args:
        expert: Size of the expert axis.
        stage_blocks: Blocks of each stage; empty is one stage with all of them.
    """
    counts = tuple(stage_blocks) or (model.num_layers,)
    read = shapes.anatomy(model)
    if read is not None:
        return stages_of(read, tensor=tensor, expert=expert, stage_blocks=counts)
    return tuple(_stage(model, index, counts, tensor=tensor) for index in range(len(counts)))


def stages_of(
    read: Anatomy,
    *,
    tensor: int = 1,
    expert: int = 1,
    stage_blocks: Sequence[int] = (),
    traced: BlockActivations | None = None,
) -> tuple[Stage, ...]:
    """Return the stages of a model that has been read, each with its own blocks.

    Args:
        read: What it is made of.
        expert: Size of the expert axis.
        stage_blocks: Blocks of each stage; empty is one stage with all of them.
        traced: What one of its blocks keeps.
    """
    counts = tuple(stage_blocks) or (len(read.blocks),)
    return tuple(
        _stage_read(read, index, counts, tensor=tensor, expert=expert, traced=traced)
        for index in range(len(counts))
    )


def _stage_read(
    read: Anatomy,
    index: int,
    counts: Sequence[int],
    *,
    tensor: int,
    expert: int,
    traced: BlockActivations | None,
) -> Stage:
    before = sum(counts[:index])
    own = range(before, before + counts[index])
    first, last = index == 0, index == len(counts) - 1

    def is_here(parameter: Parameter) -> bool:
        if parameter.block is not None:
            return parameter.block in own
        if parameter.role is Role.embedding:
            return first or (last and read.has_tied_head)
        return last

    here = filter(is_here, read.parameters)
    pieces = [_piece(parameter, tensor, expert) for parameter in here]
    return Stage(
        index=index,
        blocks=counts[index],
        has_embedding=first,
        has_head=last,
        embedding=share(read.embedding, tensor) if first else 0,
        head=share(read.head, tensor) if last else 0,
        pieces=tuple(pieces),
        traced=traced,
        first_block=before,
    )


def _piece(parameter: Parameter, tensor: int, expert: int) -> Piece:
    numel = share(parameter.numel, tensor) if parameter.shares else parameter.numel
    spread = expert if parameter.role is Role.expert else 1
    return Piece(
        numel=share(numel, spread),
        count=1,
        is_matrix=len(parameter.shape) > 1,
        in_block=parameter.block is not None,
        embedding=parameter.role is Role.embedding,
        factors=sum(parameter.shape),
        name=parameter.name,
        is_expert=parameter.role is Role.expert,
        spread=spread,
    )


def _stage(model: ModelConfig, index: int, counts: Sequence[int], *, tensor: int) -> Stage:
    blocks, pipeline = counts[index], len(counts)
    first, last = index == 0, index == pipeline - 1
    head = shapes.head_tensor(model)
    tied = model.tie_word_embeddings
    pieces: list[Piece] = []
    if first:
        pieces += _pieces(shapes.embedding_tensors(model), tensor=tensor)
    pieces += _pieces(shapes.block_tensors(model), tensor=tensor, count=blocks)
    if last:
        pieces += _pieces(shapes.final_norm_tensors(model), tensor=tensor)
        if not tied or pipeline > 1:
            pieces += _pieces((head,), tensor=tensor, embedding=tied)
    sharded_vocabulary = share(head.numel, tensor)
    return Stage(
        index=index,
        blocks=blocks,
        has_embedding=first,
        has_head=last,
        embedding=sharded_vocabulary if first else 0,
        head=sharded_vocabulary if last else 0,
        pieces=tuple(pieces),
        first_block=sum(counts[:index]),
    )


def _pieces(
    tensors: Sequence[TensorShape],
    *,
    tensor: int,
    count: int | None = None,
    embedding: bool = False,
) -> Iterator[Piece]:
    """Pieces of the tensors on one tensor rank; `count` blocks of them when they are a block's."""
    for item in tensors:
        if count != 0 and item.numel:
            yield Piece(
                numel=share(item.numel, tensor) if item.sharded else item.numel,
                count=1 if count is None else count,
                is_matrix=item.is_matrix,
                in_block=count is not None,
                embedding=embedding or item.embedding,
                factors=sum(item.shape),
                name=item.name,
            )


def share(numel: int, ranks: int) -> int:
    """Return elements that a rank has of a tensor that ranks divide."""
    return -(-numel // ranks)
