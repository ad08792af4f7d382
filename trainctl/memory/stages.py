"""Pipeline stages: their blocks, and the tensors on one of their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainctl.config.schema import ModelConfig
from trainctl.memory.activations import BlockActivations, TrainableBlock
from trainctl.models.anatomy import Anatomy, Parameter, Role
from trainctl.plans import shapes
from trainctl.plans.shapes import TensorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tensors of one kind and size on one rank."""

    numel: int
    """Elements per tensor on this rank, after tensor parallelism."""
    count: int
    """Number of tensors."""
    is_matrix: bool
    """Whether the tensor has two dimensions or more."""
    in_block: bool
    """Whether the tensor belongs to a decoder block."""
    embedding: bool
    """Whether the tensor is an embedding (or a projection tied to one)."""
    factors: int = 0
    """Elements of a factored second moment: rows plus columns of a matrix, elements of a vector."""
    name: str = ""
    """Canonical name, relative to the block if the piece is in several blocks; empty if unknown."""
    is_expert: bool = False
    """Whether the tensor is part of an expert, which `parallelism.expert` divides."""
    tensor_ranks: int = 1
    """Number of equal parts of the whole tensor that tensor ranks hold: as many as these ranks,
    unless a key-value head is on several.
    """
    spread: int = 1
    """Number of expert ranks that divide the whole tensor, besides the tensor ranks. ZeRO
    partitions this rank's part over that many times fewer ranks.
    """
    trains: bool = True
    """Whether the optimizer updates the tensor."""
    element_bytes: int | None = None
    """Bytes per element if not in the compute type: 1 for a matrix of 8 or 4 bits (raw bytes)."""
    expanded: int = 0
    """Elements of the matrix that the stored bytes of 8 or 4 bits represent."""

    def bytes(self, elements: int, weight_bytes: int) -> int:
        """Return the bytes of `elements` elements, `weight_bytes` each unless `element_bytes` is
        set.
        """
        each = weight_bytes if self.element_bytes is None else self.element_bytes
        return each * elements

    @property
    def total(self) -> int:
        return self.numel * self.count

    @property
    def partitioned(self) -> int:
        """Elements that ZeRO partitions over all replicas of the stage."""
        return self.total * self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks and tensors of a pipeline stage on one rank."""

    index: int
    """Index of the pipeline stage, from 0."""
    blocks: int
    has_embedding: bool
    """Whether the stage looks up the token embeddings."""
    has_head: bool
    """Whether the stage computes the logits and the loss."""
    embedding: int
    """Elements of the token embedding on this rank; 0 if it is elsewhere."""
    head: int
    """Elements of the output projection on this rank, tied or not; 0 if it is elsewhere."""
    pieces: tuple[Piece, ...]
    traced: BlockActivations | None = None
    """Activations of one block, if the model was traced."""
    first_block: int = 0
    """Index of the stage's first block in the model."""
    learning: tuple[tuple[TrainableBlock, int], ...] | None = None
    """Trained parts of a block, each with the number of such blocks that gradients reach; None if
    all blocks are trained whole (`trainctl.memory.partial`).
    """
    pair: tuple[Stage, ...] = ()
    """The two stages that this one stands for, if the rank has two."""

    @property
    def parts(self) -> tuple[Stage, ...]:
        """Stages of consecutive blocks: this one, or the rank's two."""
        return self.pair or (self,)

    @property
    def trained(self) -> Stage:
        """Stage without its frozen tensors."""
        if self.learning is None:
            return self
        tables = {self.embedding, self.head}  # learned position embeddings are not in here
        embeddings = [p for p in self.pieces if p.embedding and p.numel in tables]
        heads = [p for p in self.pieces if p.is_matrix and not (p.in_block or p.embedding)]
        return replace(
            self,
            pieces=tuple(piece for piece in self.pieces if piece.trains),
            embedding=self.embedding if any(piece.trains for piece in embeddings) else 0,
            head=self.head if any(piece.trains for piece in heads or embeddings) else 0,
            pair=tuple(part.trained for part in self.pair),
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
        """Number of weights: `parameters`, but counting the weights of quantized matrices, not
        bytes.
        """
        return sum((piece.expanded or piece.numel) * piece.count for piece in self.pieces)

    @property
    def tensors(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @property
    def partitioned(self) -> int:
        """Elements that ZeRO partitions, including experts on other ranks."""
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
        """Elements of the experts on this rank."""
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
        """Return the bytes of all parameters, `weight_bytes` per element in the compute type."""
        return sum(piece.bytes(piece.total, weight_bytes) for piece in self.pieces)

    def partitioned_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of the parameters that ZeRO partitions, of all its ranks together."""
        return sum(piece.bytes(piece.partitioned, weight_bytes) for piece in self.pieces)

    def block_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of one block's parameters."""
        inside = (piece for piece in self.pieces if piece.in_block)
        size = sum(piece.bytes(piece.total, weight_bytes) for piece in inside)
        return size // max(self.blocks, 1)

    def bytes_below(self, threshold: int, weight_bytes: int, ranks: int) -> int:
        """Return the bytes of the tensors of at most `threshold` elements that ZeRO partitions;
        `ranks` are those of tensors which the expert axis does not divide.
        """
        shared = (piece for piece in self.pieces if piece.spread < ranks)
        small = (piece for piece in shared if piece.numel <= threshold)
        return sum(piece.bytes(piece.total, weight_bytes) for piece in small)


def folded_stages(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return what each rank of a folded pipeline holds, as one stage: those as far from either end.

    A head tied to the embedding is the same tensor on the first rank.
    """
    found = []
    for first, second in zip(stages[: len(stages) // 2], reversed(stages), strict=False):
        second = replace(second, pieces=tuple(p for p in second.pieces if not p.embedding))
        learning = None if first.learning is None else first.learning + (second.learning or ())
        found.append(
            replace(
                first,
                blocks=first.blocks + second.blocks,
                has_head=second.has_head,
                head=second.head,
                pieces=first.pieces + second.pieces,
                learning=learning,
                pair=(first, second),
            )
        )
    return tuple(found)


def pipeline_stages(
    model: ModelConfig, *, tensor: int = 1, expert: int = 1, stage_blocks: Sequence[int] = ()
) -> tuple[Stage, ...]:
    """Return the stages of a pipeline, the embedding on the first, the head on the last.

    With more than one stage, a head tied to the embedding is held by both the first and the last.
    `expert` is the size of the expert axis. `stage_blocks` is the number of blocks per stage; empty
    means one stage with all of them.
    """
    counts = tuple(stage_blocks) or (model.num_layers,)
    read = shapes.anatomy(model)
    if read is not None:
        return stages_from_anatomy(read, tensor=tensor, expert=expert, stage_blocks=counts)
    return tuple(_make_stage(model, index, counts, tensor=tensor) for index in range(len(counts)))


def stages_from_anatomy(
    read: Anatomy,
    *,
    tensor: int = 1,
    expert: int = 1,
    stage_blocks: Sequence[int] = (),
    traced: BlockActivations | None = None,
) -> tuple[Stage, ...]:
    """Return the stages of a model with the anatomy `read`, each with its own blocks.

    `expert` is the size of the expert axis. `stage_blocks` is the number of blocks per stage; empty
    means one stage with all of them. `traced` is the activations of one block.
    """
    counts = tuple(stage_blocks) or (len(read.blocks),)
    return tuple(
        _stage_from_anatomy(read, index, counts, tensor=tensor, expert=expert, traced=traced)
        for index in range(len(counts))
    )


def _stage_from_anatomy(
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
    pieces = [_piece_of_parameter(parameter, tensor, expert) for parameter in here]
    return Stage(
        index=index,
        blocks=counts[index],
        has_embedding=first,
        has_head=last,
        embedding=elements_per_rank(read.embedding, tensor) if first else 0,
        head=elements_per_rank(read.head, tensor) if last else 0,
        pieces=tuple(pieces),
        traced=traced,
        first_block=before,
    )


def _piece_of_parameter(parameter: Parameter, tensor: int, expert: int) -> Piece:
    spread = expert if parameter.role is Role.expert else 1
    # Shared-out experts are whole: tensor ranks have different ones, and no parts of them.
    ranks = tensor if spread > 1 else tensor_parts(parameter.shares, tensor)
    numel = elements_per_rank(parameter.numel, ranks)
    return Piece(
        numel=elements_per_rank(numel, spread),
        count=1,
        is_matrix=len(parameter.shape) > 1,
        in_block=parameter.block is not None,
        embedding=parameter.role is Role.embedding,
        factors=sum(parameter.shape),
        tensor_ranks=ranks,
        name=parameter.name,
        is_expert=parameter.role is Role.expert,
        spread=spread,
    )


def _make_stage(model: ModelConfig, index: int, counts: Sequence[int], *, tensor: int) -> Stage:
    blocks, pipeline = counts[index], len(counts)
    first, last = index == 0, index == pipeline - 1
    head = shapes.head_tensor(model)
    tied = model.has_tied_head
    pieces: list[Piece] = []
    if first:
        pieces += _pieces_on_tensor_rank(shapes.embedding_tensors(model), tensor=tensor)
    pieces += _pieces_on_tensor_rank(shapes.block_tensors(model), tensor=tensor, count=blocks)
    if last:
        pieces += _pieces_on_tensor_rank(shapes.final_norm_tensors(model), tensor=tensor)
        if not tied or pipeline > 1:
            pieces += _pieces_on_tensor_rank((head,), tensor=tensor, embedding=tied)
        pieces += _pieces_on_tensor_rank(tuple(shapes.future_tensors(model)), tensor=tensor)
    embedding = shapes.embedding_tensors(model)[0].numel
    return Stage(
        index=index,
        blocks=blocks,
        has_embedding=first,
        has_head=last,
        embedding=elements_per_rank(embedding, tensor) if first else 0,
        head=elements_per_rank(head.numel, tensor_parts(head.shares, tensor)) if last else 0,
        pieces=tuple(pieces),
        first_block=sum(counts[:index]),
    )


def _pieces_on_tensor_rank(
    tensors: Sequence[TensorShape],
    *,
    tensor: int,
    count: int | None = None,
    embedding: bool = False,
) -> Iterator[Piece]:
    """Yield the pieces of `tensors` on one tensor rank; `count` is the number of blocks that have
    them, None outside blocks.
    """
    for item in tensors:
        if count != 0 and item.numel:
            parts = tensor_parts(item.shares, tensor)
            yield Piece(
                numel=elements_per_rank(item.numel, parts),
                count=1 if count is None else count,
                is_matrix=item.is_matrix,
                in_block=count is not None,
                embedding=embedding or item.embedding,
                factors=sum(item.shape),
                tensor_ranks=parts,
                name=item.name,
            )


def tensor_parts(shares: int, tensor: int) -> int:
    """Return the number of parts that a tensor of `shares` units is cut into for tensor ranks; with
    fewer units than ranks (key-value heads), several ranks hold the same part.
    """
    return min(shares, tensor) if shares else 1


def elements_per_rank(numel: int, ranks: int) -> int:
    """Return the elements on one rank of a tensor divided among `ranks` ranks, rounded up."""
    return -(-numel // ranks)
