"""Export of a checkpoint as a transformers directory: safetensors shards, config and tokenizer.

Parameters are copied a piece at a time, so neither the model nor a shard is ever in memory. They
have the names and the layout in which transformers publishes the architecture
(`trainctl.models.hf_weights`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import ModelConfig, RunConfig, TokenizerConfig
from trainctl.data.corpora import load_corpora
from trainctl.data.tokenizer import load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.models.hf_weights import Read, Unit, persistent_buffers, published_units
from trainctl.models.local_path import local_path
from trainctl.models.tensors import FUTURE, INDEX, ONE_FILE
from trainctl.models.tokenizer_files import special_tokens_of
from trainctl.options.adapter import low_rank
from trainctl.options.data.prompts import PromptsConfig
from trainctl.options.objective import objective_of
from trainctl.options.objective.contrastive import ContrastiveConfig, Pooling
from trainctl.options.tokenizer import spec_of, tokenizer_facts
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.adapters.layers import MergedWeights
from trainctl.train.checkpoint.content import CheckpointReader, write_stream
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.evaluation import first_source, prompts_of
from trainctl.train.export.output import (
    NOT_LOADED,
    ExportedCheckpoint,
    new_folder,
    write_module_file,
)
from trainctl.train.models.frozen_base import FullModel, base_file, whole_weights
from trainctl.train.models.model import fold_multipliers, skeleton, with_portable_attention
from trainctl.train.models.weights import WeightSource

SHARD_BYTES = 5 * 10**9
"""Largest weight file; only a single larger parameter exceeds it."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special token ids in `config.json`. They are not part of the shape, but sampling needs them."""


def export(
    config: RunConfig,
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    weights: str = MASTER,
    shard_bytes: int = SHARD_BYTES,
    progress: OnUnits = ignore_progress,
) -> ExportedCheckpoint:
    """Write the checkpoint's weights to a new folder that `AutoModelForCausalLM` loads, or
    `AutoModelForSequenceClassification` if the objective has a head of its own.

    An adapter is merged into its base, which must not have changed.

    The folder is written under a temporary name and renamed when it is complete.

    Args:
        out: The folder; missing or empty.
        weights: `MASTER`, or `AVERAGE` for their moving average.
        shard_bytes: Largest weight file.
        progress: Called with the bytes of weights written and their total.

    Raises:
        TrainctlError: No space (4), the folder is not empty (2), or the checkpoint is of another
            model or has no such weights (5). No files are left behind.
    """
    published = PublishedModel(config, checkpoint, dtype=dtype, weights=weights)
    _name_labels(published.model, config, RunPaths(checkpoint.resolve().parents[1]))
    total = sum(_unit_bytes(unit, dtype) for unit in published.units)
    with new_folder(out, total) as folder:
        done = 0

        def pieces(unit: Unit) -> Iterator[torch.Tensor]:
            nonlocal done
            for piece in published.pieces(unit):
                yield piece.to(unit.dtype or dtype)
                done += piece.numel() * (unit.dtype or dtype).itemsize
                progress(done, total)

        _write_weights(
            folder, _split_into_files(published.units, dtype, shard_bytes), dtype, pieces
        )
        notes = write_all_but_weights(published.model, config, dtype, folder)
    return ExportedCheckpoint(
        files=sorted(path.name for path in out.iterdir()),
        size_bytes=total,
        num_parameters=published.num_parameters,
        notes=[*notes, *published.notes],
    )


class PublishedModel:
    """A checkpoint's model in the tensors that its architecture is published in.

    An adapter is merged into its base, and muP's multipliers are folded in.

    Attributes:
        model: Skeleton of the model, without weights.
        units: The published tensors, in the model's order.
    """

    def __init__(
        self, config: RunConfig, checkpoint: Path, *, dtype: torch.dtype, weights: str
    ) -> None:
        self.model = skeleton(with_portable_attention(config.model), dtype)
        self.units = list(published_units(self.model))
        self._config = config
        self._saved = CheckpointReader(checkpoint, weights=weights)
        whole = FullModel.of(config.model, self.model)
        self._source = whole_weights(self._saved, whole, kept=base_file(checkpoint))
        self._read = _folded_reader(config.model, self.model, self._source)

    def pieces(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Yield the elements of a unit's tensors in their order, flat."""
        yield from unit.pieces(self._read)
        self._saved.close()

    @property
    def num_parameters(self) -> int:
        """Number of published parameters; tied ones count once."""
        return sum(
            parameter.numel()
            for name, parameter in self.model.named_parameters()
            if not name.startswith(f"{FUTURE}.")
        )

    @property
    def notes(self) -> list[str]:
        """Remarks on an adapter that was merged, and on blocks that are left out."""
        if self._config.model.future_blocks is not None:
            return [
                f"the blocks that predict further tokens ({FUTURE}) are left out: no class of "
                "transformers loads them for this architecture; checkpoints have them"
            ]
        adapter = low_rank(self._config.adapter)
        if not isinstance(self._source, MergedWeights) or adapter is None:
            return []
        notes = ["the adapter is merged into its base; --adapter writes it alone"]
        if adapter.is_quantized:
            notes.append(
                f"the base is what {adapter.base_weights.value} makes of it, beside which the "
                "adapter was trained"
            )
        return notes


def _split_into_files(
    units: list[Unit], dtype: torch.dtype, shard_bytes: int
) -> dict[str, list[Unit]]:
    shards: list[list[Unit]] = [[]]
    room = shard_bytes
    for unit in units:
        size = _unit_bytes(unit, dtype)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(unit)
        room -= size
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": listed
        for number, listed in enumerate(shards, 1)
    }


def _write_weights(
    folder: Path,
    shards: Mapping[str, list[Unit]],
    dtype: torch.dtype,
    pieces: Callable[[Unit], Iterator[torch.Tensor]],
) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for file, units in shards.items():
        layout = {
            name: (unit.dtype or dtype, shape)
            for unit in units
            for name, shape in unit.shapes.items()
        }
        values = chain.from_iterable(map(pieces, units))
        write_stream(folder / file, layout, values, {"format": "pt"})
        weight_map |= dict.fromkeys(layout, file)
        total += sum(_unit_bytes(unit, dtype) for unit in units)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _unit_bytes(unit: Unit, dtype: torch.dtype) -> int:
    return unit.numel * (unit.dtype or dtype).itemsize


def _folded_reader(config: ModelConfig, model: PreTrainedModel, source: WeightSource) -> Read:
    """Return a reader of a checkpoint's tensors with the muP multipliers folded in."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    built = {buffer.name: buffer.tensor for buffer in persistent_buffers(model)}

    def read(name: str, start: int, end: int) -> torch.Tensor:
        if name in built:
            saved = source.buffer(name)
            return (built[name] if saved is None else saved).reshape(-1)[start:end]
        values = source.read(name, shapes[name], start, end)
        return fold_multipliers(config, name, shapes[name], start, values)

    return read


def write_all_but_weights(
    model: PreTrainedModel, config: RunConfig, dtype: torch.dtype, folder: Path
) -> list[str]:
    """Write the configuration, tokenizer and chat template of an export; return notes."""
    if config.model.is_module:
        write_module_file(config.model, dtype, folder)
        return [NOT_LOADED, *copy_tokenizer(config.tokenizer, folder)]
    _write_config(model, config, dtype, folder)
    notes = copy_tokenizer(config.tokenizer, folder) + _write_chat(model, config, folder)
    if config.model.score_outputs is not None:
        notes += _name_padding(model.config.pad_token_id, folder)
    if isinstance(config.objective, ContrastiveConfig):
        _write_embedding_modules(config, config.objective, folder)
    return notes


_POOLING_MODES = {
    Pooling.mean: "pooling_mode_mean_tokens",
    Pooling.last: "pooling_mode_lasttoken",
    Pooling.first: "pooling_mode_cls_token",
}


def _write_embedding_modules(config: RunConfig, objective: ContrastiveConfig, folder: Path) -> None:
    """Write the files by which sentence-transformers loads a model of embeddings.

    They have the names and keys of models on the hub, which all its versions read.
    """
    named = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(named)
    ]
    modes = {name: mode is objective.pooling for mode, name in _POOLING_MODES.items()}
    pooling = {"word_embedding_dimension": config.model.hidden_size, **modes}
    longest = {"max_seq_length": config.training.sequence_length, "do_lower_case": False}
    for _, name in named[1:]:
        (folder / name).mkdir()
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", longest)
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})
    settings = folder / "tokenizer_config.json"
    if settings.is_file():  # it pads texts of a batch, under a mask
        facts = json.loads(settings.read_text(encoding="utf-8"))
        if facts.get("pad_token") is None and facts.get("eos_token") is not None:
            write_json(settings, facts | {"pad_token": facts["eos_token"]})


def _write_config(
    model: PreTrainedModel, config: RunConfig, dtype: torch.dtype, folder: Path
) -> None:
    """Write `config.json`; copy generation config and code of a model directory."""
    written = model.config
    written.architectures = [type(model).__name__]
    written.dtype = dtype
    written.use_cache = True  # off while training
    for name, number in _source_ids(config.model).items():
        setattr(written, name, number)
    if getattr(written, "eos_token_id", None) is None:  # a user's own class may lack it
        written.eos_token_id = load_tokenizer(config.tokenizer).end_of_document
    head = objective_of(config.objective).head
    if head is not None:
        written.pad_token_id = _padding_id(config)
        for name, value in head.settings(config.objective).items():
            setattr(written, name, value)
    written.save_pretrained(folder)
    if config.model.path is not None:
        source = local_path(config.model.path)
        code = source.glob("*.py") if config.model.trust_remote_code else ()
        for file in (source / "generation_config.json", *code):
            if file.is_file():
                shutil.copy(file, folder)


def _name_labels(model: PreTrainedModel, config: RunConfig, run: RunPaths) -> None:
    """Give a classifier's configuration the names of its classes, as the run's corpus has them."""
    if config.model.score_outputs is None or not run.corpus.is_file():
        return
    for corpus in load_corpora(run.corpus, config.data).values():
        model.config.id2label = model.config.id2label | dict(enumerate(corpus.classes))
        model.config.label2id = {name: n for n, name in model.config.id2label.items()}


def _padding_id(config: RunConfig) -> int | None:
    """Return the id that pads texts to score; None if there is none that no text ends with.

    transformers takes the score at the last token with another id. So the id that ends a document
    cannot pad: the score would be that of the token before it.
    """
    tokenizer, rows = load_tokenizer(config.tokenizer), config.model.vocab_size
    named = {} if tokenizer.file is None else special_tokens_of(tokenizer.file)
    pad, start = (
        tokenizer.id_of(named[key]) if key in named else None for key in ("pad_token", "bos_token")
    )
    unused = tokenizer.vocab_size if tokenizer.vocab_size < rows else None
    usable = (each for each in (pad, unused, start) if each != tokenizer.end_of_document)
    return next((each for each in usable if each is not None), None)


def _name_padding(number: int | None, folder: Path) -> list[str]:
    """Let an exported tokenizer pad with the id that the model expects; return notes.

    Args:
        number: `pad_token_id` of the model; an unused one gets a token.
    """
    if number is None:
        return [
            "no id is left to pad with that no text ends with: score one text at a time, or train "
            "a model with a larger model.vocab_size"
        ]
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    if not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token = tokenizer.id_to_token(number)
    if token is None:
        token = "<|pad|>"
        while tokenizer.token_to_id(token) is not None:
            token = f"<{token}>"
        tokenizer.add_special_tokens([token])
        if tokenizer.token_to_id(token) != number:  # there are unused ids below
            return [f"its tokenizer has no token to pad with: pad texts of a batch with {number}"]
        tokenizer.save(str(folder / "tokenizer.json"))
    for file in filter(Path.is_file, files):
        write_json(file, json.loads(file.read_text(encoding="utf-8")) | {"pad_token": token})
    return []


def _write_chat(model: PreTrainedModel, config: RunConfig, folder: Path) -> list[str]:
    """Write the chat template and the ids that end an answer; return notes.

    The template is written only if the run names one; the ids go to `generation_config.json`.
    """
    section = first_source(config.data)
    is_named = getattr(section, "chat_template", None) is not None
    try:
        prompts = prompts_of(
            config.data, load_tokenizer(config.tokenizer), chat=True if is_named else None
        )
    except TrainctlError as error:  # the user's template file; weights do not need it
        return [f"without the chat template of the run: {error.message}"]
    template = prompts.template
    if template is None and not isinstance(section, PromptsConfig):
        return []
    if template is not None and is_named:
        (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    file, said = folder / "generation_config.json", model.config.eos_token_id
    facts = {name: getattr(model.config, name, None) for name in TOKEN_IDS}
    if file.is_file():
        facts = json.loads(file.read_text(encoding="utf-8"))
        said = facts.get("eos_token_id", said)
    known = said if isinstance(said, list) else [] if said is None else [said]
    others = sorted(prompts.ends.difference(known))
    if others:
        ends = [*known, *others]
        write_json(file, facts | {"eos_token_id": ends if len(ends) > 1 else ends[0]})
    if template is None or not template.arguments:
        return []
    given = ", ".join(f"{name}={value!r}" for name, value in template.arguments.items())
    return [f"its chat template was given {given}: whoever asks the model gives it the same"]


def _source_ids(model: ModelConfig) -> dict[str, Any]:
    """Return the special token ids of the directory that a closed-form model was read from.

    Empty if the model is from no such directory, or the directory is gone.
    """
    if model.path is None or not model.has_closed_form:
        return {}
    try:
        source = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: source[name] for name in TOKEN_IDS if source.get(name) is not None}


def copy_tokenizer(config: TokenizerConfig, folder: Path) -> list[str]:
    """Copy the tokenizer's files; return notes if it has none to publish."""
    spec = spec_of(config)
    if spec.published is None:
        return [f"no tokenizer files: {spec.why_not_published}"]
    files = spec.published(config)
    for name, file in files.items():
        shutil.copy(file, folder / name)
    settings = folder / "tokenizer_config.json"
    # Without it transformers guesses the class from the model's.
    if "tokenizer.json" in files and not settings.is_file():
        end = tokenizer_facts(config).end_token
        named = {"eos_token": end} if end else {}
        write_json(settings, {"tokenizer_class": "PreTrainedTokenizerFast"} | named)
    return []
