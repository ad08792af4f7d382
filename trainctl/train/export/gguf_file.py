"""Export of a checkpoint as a GGUF file, which llama.cpp loads.

Names of tensors and keys are those of llama.cpp's package `gguf`, and its `convert_hf_to_gguf.py`
is the reference of what a file contains. One tensor is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainctl.config.schema import RunConfig
from trainctl.data.tokenizer import load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.models.hf_weights import Unit
from trainctl.options.tokenizer import spec_of
from trainctl.runs.files import temporary_folder
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.export.directory import PublishedModel, write_all_but_weights
from trainctl.train.export.output import ExportedCheckpoint, new_file

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

Q8_0: Literal["q8_0"] = "q8_0"
"""Blocks of 32 weights in 8 bits each, with a common factor in fp16."""
BLOCK = 32
PART = 1 << 20
"""Weights that are rounded at a time."""

FileType: TypeAlias = torch.dtype | Literal["q8_0"]

TYPES: Mapping[Any, tuple[str, str]] = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
    Q8_0: ("Q8_0", "MOSTLY_Q8_0"),
}
"""ggml's type of the matrices and the file's type, by the exported type."""

OTHERWISE = "export to transformers, which llama.cpp's convert_hf_to_gguf.py may know"
"""Hint of what is refused."""

ALWAYS_FP32 = ("token_types.weight", "position_embd.weight")
"""Matrices that llama.cpp reads in fp32 alone, beside all vectors."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that llama.cpp computes as transformers does."""

    name: str
    """llama.cpp's name."""
    is_rotary: bool = True
    has_pairs: bool = False
    """Whether rotary embeddings turn neighbouring elements, and not those half a head apart: the
    rows of queries and keys are then interleaved in the file.
    """


ARCHITECTURES = {
    "gpt2": Architecture("gpt2", is_rotary=False),
    "llama": Architecture("llama", has_pairs=True),
    "mistral": Architecture("llama", has_pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}
"""Architectures by transformers' `model_type`."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    (GPT2_PATTERN,): "gpt-2",
    (r"\p{N}", GPT2_PATTERN): "smollm",
    (LLAMA3_PATTERN,): "llama-bpe",
    (LLAMA3_PATTERN.replace("{1,3}", ""),): "qwen2",
}
"""llama.cpp's names of the patterns by which a text is split before merges (`llama-vocab.cpp`)."""
IGNORES_MERGES = ("llama-bpe",)
"""Splits with which llama.cpp takes a part that is in the vocabulary as one token."""


def export_gguf(
    config: RunConfig,
    checkpoint: Path,
    out: Path,
    *,
    dtype: FileType,
    weights: str = MASTER,
    progress: OnUnits = ignore_progress,
) -> ExportedCheckpoint:
    """Write the checkpoint's weights, tokenizer and chat template to a new GGUF file.

    An adapter is merged into its base, which must not have changed.

    Args:
        out: The file, which must not exist.
        weights: `MASTER`, or `AVERAGE` for their moving average.
        progress: Called with the bytes of weights written and their total.

    Raises:
        TrainctlError: llama.cpp does not have the architecture or the tokenizer (2), or the file
            cannot be written (4).
    """
    import gguf

    made_of = torch.float32 if dtype == Q8_0 else dtype
    assert isinstance(made_of, torch.dtype)
    _require_published(config)
    published = PublishedModel(config, checkpoint, dtype=made_of, weights=weights)
    shape = published.model.config
    architecture = architecture_of(shape)
    writer = gguf.GGUFWriter(None, architecture.name)
    _add_shape(writer, shape, architecture)
    writer.add_file_type(gguf.LlamaFileType[TYPES[dtype][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_name(config.model.name)
    notes = _add_tokenizer(writer, published, config, made_of)
    tensors = _tensors(published, architecture, dtype)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.kind
        )
    total = sum(tensor.num_bytes for tensor in tensors)
    with new_file(out, total) as path:
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            done = 0
            for tensor in tensors:
                writer.write_tensor_data(tensor.values())
                done += tensor.num_bytes
                progress(done, total)
        finally:
            writer.close()
    return ExportedCheckpoint(
        files=[out.name],
        size_bytes=total,
        num_parameters=published.num_parameters,
        notes=[*notes, *published.notes],
    )


def _require_published(config: RunConfig) -> None:
    """Refuse a model that llama.cpp has no form of: of the user's own, or with a head `score`."""
    if config.model.score_outputs is not None:
        raise _unknown("a head `score`")
    if config.model.is_module or config.model.factory is not None:
        raise _unknown("a model of your own code")


def architecture_of(shape: PretrainedConfig) -> Architecture:
    """Return the architecture of a model.

    Raises:
        TrainctlError: llama.cpp does not have it, or computes one of its settings otherwise.
    """
    if shape.model_type not in ARCHITECTURES:
        raise _unknown(f"model type {shape.model_type}")
    found = ARCHITECTURES[shape.model_type]
    for key, legal in _legal_settings(shape).items():
        value = getattr(shape, key, legal[0])
        if value not in legal:
            raise TrainctlError(
                f"--to gguf: llama.cpp's {found.name} has no {key}={value}",
                hint=OTHERWISE,
            )
    return found


def _legal_settings(shape: PretrainedConfig) -> dict[str, tuple[Any, ...]]:
    """Return the values of a model's settings that llama.cpp computes with."""
    if shape.model_type == "gpt2":
        return {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
    window = getattr(shape, "sliding_window", None)
    is_wide = window is not None and window >= shape.max_position_embeddings
    legal: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
    if getattr(shape, "use_sliding_window", True):
        legal["sliding_window"] = (None, window) if is_wide else (None,)
    return legal


def _unknown(what: str) -> TrainctlError:
    return TrainctlError(
        f"--to gguf does not know {what}: it knows {', '.join(ARCHITECTURES)}",
        hint=OTHERWISE,
    )


def _add_shape(writer: GGUFWriter, shape: PretrainedConfig, architecture: Architecture) -> None:
    """Add the hyperparameters that llama.cpp reads."""
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_vocab_size(shape.vocab_size)
    if not architecture.is_rotary:
        writer.add_feed_forward_length(shape.n_inner or 4 * shape.hidden_size)
        writer.add_layer_norm_eps(shape.layer_norm_epsilon)
        return
    size = _head_size(shape)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    kind = shape.rope_parameters.get("rope_type", "default")
    if kind == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope_parameters["factor"])
    elif kind not in ("default", "llama3"):
        raise TrainctlError(
            f"--to gguf knows rotary embeddings default, linear and llama3, not {kind}",
            hint=OTHERWISE,
        )


def _head_size(shape: PretrainedConfig) -> int:
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(size)


@dataclass(frozen=True, slots=True)
class Layout:
    """Place of a tensor in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    is_transposed: bool
    heads: int
    """Heads whose rows are interleaved; 0 leaves the rows as they are."""

    @classmethod
    def of(
        cls, name: str, sizes: tuple[int, ...], model: PretrainedConfig, dtype: FileType
    ) -> Layout:
        """Return the place of a tensor.

        Vectors are in fp32, as are matrices that llama.cpp reads so, and rows that blocks do not
        divide are in fp16.

        Raises:
            TrainctlError: llama.cpp has no place for it.
        """
        import gguf

        architecture = architecture_of(model)
        numbers = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(numbers[architecture.name], model.num_hidden_layers)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise TrainctlError(f"--to gguf: llama.cpp's {architecture.name} has no {name}")
        # transformers' Conv1D has the inputs first.
        is_transposed = not architecture.is_rotary and name.endswith(
            (".c_attn.weight", ".c_fc.weight", ".c_proj.weight")
        )
        shape = sizes[::-1] if is_transposed else sizes
        kind = gguf.GGMLQuantizationType[TYPES[dtype][0]]
        if len(shape) < 2 or found in ALWAYS_FP32:
            kind = gguf.GGMLQuantizationType.F32
        elif dtype == Q8_0 and shape[-1] % BLOCK:
            kind = gguf.GGMLQuantizationType.F16
        heads = 0
        if architecture.has_pairs and ".q_proj." in name:
            heads = model.num_attention_heads
        elif architecture.has_pairs and ".k_proj." in name:
            heads = model.num_key_value_heads
        return cls(found, shape, kind, is_transposed, heads)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """Return a published tensor in the file's layout."""
        if self.is_transposed:
            return values.T.contiguous()
        if self.heads:
            halves = values.view(self.heads, 2, -1, *values.shape[1:])
            return halves.transpose(1, 2).reshape(values.shape)
        return values

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the file's type makes of a published tensor, in fp32."""
        from gguf import quants

        values = values.T.contiguous() if self.is_transposed else values
        stored = quants.quantize(values.numpy(), self.kind)
        made = torch.from_numpy(quants.dequantize(stored, self.kind))
        return made.T if self.is_transposed else made


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    fetch: Callable[[], torch.Tensor]
    """Returns the values in fp32, in the shape."""

    @property
    def num_bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * size

    def values(self) -> npt.NDArray[Any]:
        """Return the values in the tensor's type; bytes where numpy has no such type."""
        from gguf import quants

        whole = self.fetch().numpy()
        # In parts, because `quantize` makes several copies of what it is given.
        parts = np.array_split(whole, min(len(whole), 1 + whole.size // PART))
        return np.concatenate([quants.quantize(part, self.kind) for part in parts])


def _tensors(
    published: PublishedModel, architecture: Architecture, dtype: FileType
) -> list[_Tensor]:
    """Return the tensors of a model in the file's order.

    Raises:
        TrainctlError: llama.cpp has no place for one of them.
    """
    import gguf

    shape = published.model.config
    tensors = []
    for unit in published.units:
        ((theirs, sizes),) = unit.shapes.items()
        layout = Layout.of(theirs, sizes, shape, dtype)
        fetch = _fetcher(published, unit, sizes, layout)
        tensors.append(_Tensor(layout.name, layout.shape, layout.kind, fetch))
    if architecture.is_rotary and shape.rope_parameters.get("rope_type") == "llama3":
        factors = _rope_factors(shape)
        kind = gguf.GGMLQuantizationType.F32
        tensors.append(_Tensor("rope_freqs.weight", (factors.numel(),), kind, lambda: factors))
    return tensors


def _fetcher(
    published: PublishedModel, unit: Unit, sizes: tuple[int, ...], layout: Layout
) -> Callable[[], torch.Tensor]:
    """Return a function that reads a published tensor in the file's layout, in fp32."""

    def fetch() -> torch.Tensor:
        values, done = torch.empty(unit.numel), 0
        for piece in published.pieces(unit):
            values[done : done + piece.numel()] = piece
            done += piece.numel()
        return layout.apply(values.view(sizes))

    return fetch


def _rope_factors(shape: PretrainedConfig) -> torch.Tensor:
    """Return what llama.cpp divides the rotary frequencies by, fp32 (head size / 2,)."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](shape, torch.device("cpu"))
    size = _head_size(shape)
    plain = shape.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
    return (plain / scaled).float()


def _add_tokenizer(
    writer: GGUFWriter, published: PublishedModel, config: RunConfig, dtype: torch.dtype
) -> list[str]:
    """Add vocabulary, merges, special tokens and chat template; return notes.

    Raises:
        TrainctlError: llama.cpp splits texts otherwise than the tokenizer does.
    """
    from gguf import SpecialVocab, TokenType

    rows = published.model.config.vocab_size
    with temporary_folder() as folder:
        notes = write_all_but_weights(published.model, config, dtype, folder)
        if (folder / "tokenizer.json").is_file():
            made = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        elif spec_of(config.tokenizer).is_byte_level:
            made, notes = _byte_tokenizer(load_tokenizer(config.tokenizer).end_of_document), []
        else:
            raise TrainctlError(
                "--to gguf needs the tokenizer's tokenizer.json, and there is none",
                hint="save it by transformers' AutoTokenizer.from_pretrained(DIR)"
                ".save_pretrained(DIR)",
            )
        special = SpecialVocab(folder, load_merges=True, n_vocab=rows)
        ends = _ends(folder)
    tokens = {number: (text, TokenType.NORMAL) for text, number in made["model"]["vocab"].items()}
    for each in made["added_tokens"]:
        kind = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
        tokens[each["id"]] = (each["content"], kind)
    listed = [tokens.get(row, (f"[PAD{row}]", TokenType.UNUSED)) for row in range(rows)]
    if made.get("normalizer"):
        notes.append("llama.cpp does not bring texts into NFC, as the tokenizer does")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_of(made))
    writer.add_token_list([text for text, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    # llama.cpp wants merges, and an array of GGUF is not empty: this pair is no token.
    special.merges = special.merges or ["Ā Ā"]
    special.special_token_ids = {"eos": ends[0]} | special.special_token_ids if ends else {}
    for other in [end for end in ends if end != special.special_token_ids.get("eos")][:1]:
        special.special_token_ids["eot"] = other
    special.add_special_token["bos"] = bool(load_tokenizer(config.tokenizer).begin_of_text)
    special.add_to_gguf(writer, quiet=True)
    return notes


def _ends(folder: Path) -> list[int]:
    """Return the ids that end an answer, from an exported directory without weights."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            said = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            found += said if isinstance(said, list) else [] if said is None else [said]
    return list(dict.fromkeys(found))


def _byte_tokenizer(end: int | None) -> dict[str, Any]:
    """Return the byte tokenizer as a tokenizer.json without merges would have it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    added = [] if end is None else [{"id": end, "content": "<|endoftext|>", "special": True}]
    vocabulary = {text: number for number, text in bytes_to_unicode().items()}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"model": model, "added_tokens": added, "pre_tokenizer": {"type": "ByteLevel"}}


def _split_of(made: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how a tokenizer.json splits texts before merges.

    Raises:
        TrainctlError: llama.cpp has no such split, or not of byte-level BPE.
    """
    model = made["model"]
    steps = list(_pre_tokenizers(made.get("pre_tokenizer") or {}))
    last = steps[-1] if steps else {}
    is_byte_level = model.get("type") == "BPE" and last.get("type") == "ByteLevel"
    if not is_byte_level or last.get("add_prefix_space"):
        raise TrainctlError(
            "--to gguf knows byte-level BPE without a space put before the text alone, and the "
            f"tokenizer is {model.get('type')} after {last.get('type')}",
            hint=OTHERWISE,
        )
    normalizer = (made.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # that of Qwen 2, which llama.cpp leaves out
        raise TrainctlError(
            f"--to gguf does not know a tokenizer that changes texts by {normalizer}"
        )
    if not model["merges"]:  # whole words or not, bytes stay bytes
        return "gpt-2"
    patterns = [_pattern(each) for each in steps[:-1]]
    patterns += [GPT2_PATTERN] if last.get("use_regex", True) else []
    found = SPLITS.get(tuple(patterns))
    if found is None:
        raise TrainctlError(
            f"--to gguf does not know a tokenizer that splits texts by {patterns}",
            hint=f"it knows what llama.cpp calls {', '.join(SPLITS.values())}",
        )
    needed, given = found in IGNORES_MERGES, bool(model.get("ignore_merges"))
    if given is not needed:
        expects, has = (f"ignore_merges={json.dumps(value)}" for value in (needed, given))
        raise TrainctlError(
            f"llama.cpp's {found} is for tokenizers with {expects}, and tokenizer.json has {has}: "
            "some words would be other tokens",
            hint=f"a tokenizer.json of the same model with {expects}, and training with it; or "
            + OTHERWISE,
        )
    return found


def _pre_tokenizers(section: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a tokenizer.json's `pre_tokenizer`, nested ones in order."""
    if section.get("type") == "Sequence":
        for each in section["pretokenizers"]:
            yield from _pre_tokenizers(each)
    elif section:
        yield section


def _pattern(step: Mapping[str, Any]) -> str:
    """Return the pattern by which a step splits; its name if it has none."""
    if step["type"] == "Digits" and step.get("individual_digits"):
        return r"\p{N}"
    is_plain = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return str(step["pattern"].get("Regex")) if is_plain else str(step["type"])
