"""Proof of an export: loaded by the library it is for, it computes what the checkpoint computes.

Three things are compared: scores of tokens, the ids of texts and of messages in the chat template,
and what ends an answer. Scores are compared in fp32 with those of the checkpoint's weights *rounded
to the export's format*, so a difference is an error of the export, and no rounding of its format.
The bound is measured on the model itself: what a change of every weight in its last place of fp32,
up or down at random, makes of the same scores. Another order of sums changes them as much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from trainctl.config.schema import RunConfig
from trainctl.data.chat_template import CannotRender
from trainctl.data.tokenizer import load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.plans.trainable import trainable
from trainctl.train.adapters.layers import apply_adapter
from trainctl.train.adapters.quantized import dequantized_source
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.evaluation import Prompts, prompts_of
from trainctl.train.export.output import load_module
from trainctl.train.models.encoders import auto_class
from trainctl.train.models.frozen_base import (
    FullModel,
    base_file,
    recorded_base,
    whole_weights,
)
from trainctl.train.models.model import (
    fold_multipliers,
    materialise,
    skeleton,
    with_portable_attention,
)

CPU = torch.device("cpu")
LAST_PLACE = 2.0**-23
"""Relative size of a change in the last place of fp32."""
FACTOR = 8
"""Bound as a multiple of what one such change of every weight makes: other kernels sum in another
order in every layer, and the largest of several draws exceeds the largest of one.
"""
ROUNDINGS = 4
"""Bound of llama.cpp beside that, as a multiple of what the format makes of the weights: it also
rounds what the weights are multiplied by.
"""
WINDOW = 64
"""Tokens of a prompt at most."""

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 1,234.5 and they'll pay WE'RE told.",
    "def f(x):\n    return x ** 2  # squared\n\n\n\ttab",
    "naïve café, 東京, Привет, مرحبا, 😀",
    "  two spaces before and after  ",
)
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": TEXTS[2]},
    ],
    [
        {"role": "user", "content": TEXTS[0]},
        {"role": "assistant", "content": "So it is."},
        {"role": "user", "content": TEXTS[1]},
    ],
)


class Target(Protocol):
    """An export as the library loads it that it is for."""

    library: str
    """Name and version of the library."""
    sees_all: bool
    """Whether `scores` has every position of a prompt; otherwise only its end."""

    def scores(self, ids: list[int]) -> torch.Tensor:
        """Return log-probabilities of tokens after each position, (positions, vocabulary); of a
        model with a head `score`, its outputs for the whole text, (1, outputs).
        """

    def text_ids(self, text: str) -> list[int] | None:
        """Return the ids of a plain text with the special tokens that the target adds to one; None
        if the export has no tokenizer.
        """

    def chat_ids(self, messages: list[dict[str, str]], arguments: dict[str, Any]) -> list[int]:
        """Return the ids of messages and of the start of an answer, in the chat template."""

    def stops_at(self, token: int) -> bool:
        """Return True if an answer ends at the token."""


@dataclass
class CheckedExport:
    """Result of a check, in numbers."""

    library: str
    scores: int = 0
    """Number of scores that were compared."""
    difference: float = 0.0
    """Largest difference of a score, in nats."""
    bound: float = 0.0
    """Largest difference that other orders of sums explain."""
    rounding: float = 0.0
    """Largest change of a score by the export's format alone, against the checkpoint's fp32."""
    texts: int = 0
    """Texts and conversations whose ids were compared."""
    ends: list[int] = field(default_factory=list)
    """Ids that end an answer."""
    states: int = 0
    """Numbers of weights and optimizer states that were compared bit for bit."""
    differences: list[str] = field(default_factory=list)
    """Everything that differs, in words; empty if the export is equal."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and whether the export is `equal`."""
        return {"equal": not self.differences, **vars(self)}


Round = Callable[[str, torch.Tensor], torch.Tensor]
"""Function that rounds a parameter to the export's format, by its canonical name; in fp32."""


@dataclass(frozen=True, slots=True)
class ExportCase:
    """An exported checkpoint."""

    config: RunConfig
    checkpoint: Path
    out: Path
    dtype: Any
    """Type of the exported weights."""
    weights: str = MASTER
    """Name of the exported state."""


def check_directory(config: RunConfig, checkpoint: Path, out: Path, **of: Any) -> CheckedExport:
    """Check a directory by transformers; of a user's module, by `trainctl.load`.

    Args:
        of: `dtype` and `weights` of the export, as of an `ExportCase`.
    """
    case = ExportCase(config, checkpoint, out, **of)
    return compare(case, partial(TransformersTarget, case), rounding_to(case.dtype))


def check_adapter(config: RunConfig, checkpoint: Path, out: Path, **of: Any) -> CheckedExport:
    """Check an adapter by PEFT, on the base that it was trained on."""
    case = ExportCase(config, checkpoint, out, **of)
    exported = {tensor.name for tensor in trainable(config).trained}
    rounded = rounding_to(case.dtype)

    def of_adapter(name: str, values: torch.Tensor) -> torch.Tensor:
        return rounded(name, values) if name in exported else values

    return compare(case, partial(_PeftTarget, case), of_adapter, merges=False)


def check_gguf(config: RunConfig, checkpoint: Path, out: Path, **of: Any) -> CheckedExport:
    """Check a GGUF file by llama.cpp itself."""
    case = ExportCase(config, checkpoint, out, **of)
    from trainctl.train.export.gguf_file import Layout, architecture_of

    shape = skeleton(with_portable_attention(config.model), torch.float32).config

    def rounded(name: str, values: torch.Tensor) -> torch.Tensor:
        return Layout.of(name, tuple(values.shape), shape, case.dtype).rounded(values)

    # ggml's kernel of gelu for CPUs is a table of fp16 values.
    place = LAST_PLACE if architecture_of(shape).is_rotary else 2.0**-11
    return compare(case, partial(_LlamaCppTarget, case), rounded, place=place)


def rounding_to(dtype: torch.dtype) -> Round:
    """Return the rounding of an export with all weights in one type."""
    return lambda name, values: values.to(dtype).float()


def compare(
    case: ExportCase,
    load: Callable[[], Target],
    rounded: Round,
    *,
    merges: bool = True,
    place: float = LAST_PLACE,
) -> CheckedExport:
    """Compare an export with its checkpoint; one model is in memory at a time.

    Args:
        merges: Whether an adapter is merged into its base.
        place: Relative size of the change of each weight that gives the bound.
    """
    config = case.config
    tokenizer = load_tokenizer(config.tokenizer)
    prompts = prompts_of(config.data, tokenizer)
    chat = _chat_prompts(config)
    ids = _prompt_ids(config, prompts, chat)
    model = _reference(case, merges=merges)
    exact = [_scores(model, each) for each in ids]
    _change(model, partial(_round_folded, config, rounded))
    ours = [_scores(model, each) for each in ids]
    generator = torch.Generator().manual_seed(0)

    def nudged_by(name: str, values: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
        return values * (1 + signs * place)

    _change(model, nudged_by)
    nudged = [_scores(model, each) for each in ids]
    del model
    target = load()
    theirs = [target.scores(each) for each in ids]
    checked = CheckedExport(target.library)
    noise, checked.rounding = _largest(nudged, ours), _largest(exact, ours)
    checked.bound = FACTOR * noise
    if not target.sees_all:
        ours = [each[-1:] for each in ours]
        checked.bound += ROUNDINGS * checked.rounding
    checked.scores = sum(each.numel() for each in ours)
    checked.difference = _largest(theirs, ours)
    if not checked.difference <= checked.bound:  # NaN differs, too
        checked.differences.append(
            f"scores differ by {checked.difference:.2g}, where {checked.bound:.2g} is rounding"
        )
    _compare_tokens(checked, target, prompts, chat)
    return checked


def _reference(case: ExportCase, *, merges: bool) -> nn.Module:
    """Return the checkpoint's model in fp32."""
    shape = with_portable_attention(case.config.model)
    model = skeleton(shape, torch.float32)
    saved = CheckpointReader(case.checkpoint, weights=case.weights)
    whole = FullModel.of(case.config.model, model)
    source = whole_weights(saved, whole, kept=base_file(case.checkpoint), merges=merges)
    if not merges:
        apply_adapter(model, case.config)
    materialise(model, source, CPU)
    return model.eval()


def _change(model: nn.Module, change: Round) -> None:
    """Change every parameter in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(change(name, parameter.detach()))


def _round_folded(
    config: RunConfig, rounded: Round, name: str, values: torch.Tensor
) -> torch.Tensor:
    """Round a parameter as its export does: with the muP multipliers that it has there."""
    factors = torch.ones_like(values).view(-1)
    factors = fold_multipliers(config.model, name, values.shape, 0, factors).view(values.shape)
    return rounded(name, values * factors) / factors


def _scores(model: nn.Module, ids: list[int], padding: Sequence[int] = ()) -> torch.Tensor:
    """Return the log-probabilities of tokens after each position, or a classifier's logits.

    Args:
        padding: Ids that follow in a batch with a longer text.
    """
    batch = torch.tensor(
        [[*ids, *padding], *([[*ids, *ids[:1] * len(padding)]] if padding else [])]
    )
    mask = torch.ones_like(batch)
    mask[0, len(ids) :] = 0
    masked = {"attention_mask": mask} if padding else {}
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=batch, **masked).logits[0].float()
    return logits[None] if logits.dim() == 1 else logits.log_softmax(dim=-1)


def _largest(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of any score; infinite if shapes differ."""
    if any(a.shape != b.shape for a, b in zip(left, right, strict=True)):
        return math.inf
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def _chat_prompts(config: RunConfig) -> Prompts | None:
    """Return the encoder of messages; None if the run has no chat template."""
    try:
        return prompts_of(config.data, load_tokenizer(config.tokenizer), chat=True)
    except TrainctlError:
        return None


def _prompt_ids(config: RunConfig, prompts: Prompts, chat: Prompts | None) -> list[list[int]]:
    """Return the prompts whose scores are compared: messages, a text, and random tokens."""
    window = min(WINDOW, config.training.sequence_length, config.model.max_position_embeddings)
    found = [prompts.text_ids(TEXTS[0])]
    if chat is not None and chat.template is not None:
        found.append(chat.template.prompt(CONVERSATIONS[0]).tolist())
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, prompts.tokenizer.vocab_size, (window,), generator=generator)
    return [each[:window] for each in (*found, drawn.tolist()) if each]


def _compare_tokens(
    checked: CheckedExport, target: Target, prompts: Prompts, chat: Prompts | None
) -> None:
    """Compare ids of texts and messages, and what ends an answer."""
    if target.text_ids("") is None:
        checked.notes.append("it has no tokenizer, so ids of texts are not compared")
    else:
        tokenizer = prompts.tokenizer
        encode = tokenizer.encode if tokenizer.file is None else tokenizer.encode_sequence
        for text in TEXTS:
            _compare_ids(checked, repr(text), target.text_ids(text), encode(text).tolist())
        if prompts.text_ids(TEXTS[0]) != [*tokenizer.begin_of_text, *tokenizer.encode(TEXTS[0])]:
            begin = tokenizer.decode(tokenizer.begin_of_text, with_special=True)
            checked.notes.append(
                f"it puts {begin} before a text, and the run does not: data.begin_documents="
                f"{prompts.section.begin_documents.value}"
            )
        for messages in CONVERSATIONS if chat is not None else ():
            assert chat is not None and chat.template is not None
            try:
                wanted = chat.template.prompt(messages).tolist()
            except CannotRender:  # no system message, say
                continue
            made = target.chat_ids(messages, chat.template.arguments)
            _compare_ids(checked, f"the messages {messages}", made, wanted)
    checked.ends = sorted(prompts.ends)
    missed = [end for end in checked.ends if not target.stops_at(end)]
    if missed:
        checked.differences.append(f"an answer does not end at {missed}")


def _compare_ids(
    checked: CheckedExport, what: str, made: list[int] | None, wanted: list[int]
) -> None:
    checked.texts += 1
    if made != wanted:
        checked.differences.append(f"{what} is {made}, and not {wanted}")


class TransformersTarget:
    """A directory that transformers loads; of a user's module, that `trainctl.load` loads."""

    sees_all = True

    def __init__(self, case: ExportCase) -> None:
        trusts = {"trust_remote_code": True} if case.config.model.trust_remote_code else {}
        self.library = f"transformers {transformers.__version__}"
        if case.config.model.is_module:
            self.library = "trainctl.load"
        self._model = self._load(case, **trusts)
        self._tokenizer = None
        if (case.out / "tokenizer_config.json").is_file():
            self._tokenizer = AutoTokenizer.from_pretrained(case.out, **trusts)
        self._padding: int | None = None
        """Id that pads texts of a batch to score, by the tokenizer if there is one."""
        if case.config.model.score_outputs is not None:
            padded_by = self._tokenizer or self._model.config
            self._padding = padded_by.pad_token_id

    def _load(self, case: ExportCase, **trusts: bool) -> Any:
        if case.config.model.is_module:
            return load_module(case.out, dtype=torch.float32)
        shape = AutoConfig.from_pretrained(case.out, **trusts)
        kind = auto_class(shape, has_score=case.config.model.score_outputs is not None)
        return kind.from_pretrained(case.out, dtype=torch.float32, **trusts).eval()

    def scores(self, ids: list[int]) -> torch.Tensor:
        if self._padding is None:
            return _scores(self._model, ids)
        return _scores(self._model, ids, [self._padding] * 3)

    def text_ids(self, text: str) -> list[int] | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer(text)["input_ids"]

    def chat_ids(self, messages: list[dict[str, str]], arguments: dict[str, Any]) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **arguments
        )

    def stops_at(self, token: int) -> bool:
        settings = getattr(self._model, "generation_config", None)
        if settings is None:  # a module: nothing generates but its user's code
            return True
        ends = settings.eos_token_id
        return token in (ends if isinstance(ends, list) else [ends])


class _PeftTarget(TransformersTarget):
    """An adapter that PEFT loads; tokenizer and ends are the base's."""

    def __init__(self, case: ExportCase) -> None:
        import peft

        super().__init__(case)
        self.library, self._tokenizer = f"peft {peft.__version__}", None
        self._padding = None  # the base's

    def _load(self, case: ExportCase, **trusts: bool) -> Any:
        import peft

        facts = CheckpointReader(case.checkpoint).manifest["base"]
        adapter = low_rank(case.config.adapter)
        assert adapter is not None
        if facts["kind"] == "directory" and not adapter.is_quantized:
            outputs = case.config.model.score_outputs
            shape = AutoConfig.from_pretrained(facts["path"], **trusts)
            labels = {} if outputs is None else {"num_labels": outputs}
            base = auto_class(shape, has_score=outputs is not None).from_pretrained(
                facts["path"], dtype=torch.float32, **labels, **trusts
            )
        else:  # a seed's, another run's, or quantized: no directory has it
            base = skeleton(with_portable_attention(case.config.model), torch.float32)
            whole, kept = FullModel.of(case.config.model, base), base_file(case.checkpoint)
            source = recorded_base(facts, whole, kept=kept).source
            materialise(base, dequantized_source(source, case.config.model, adapter), CPU)
        return peft.PeftModel.from_pretrained(base, str(case.out)).eval()

    def stops_at(self, token: int) -> bool:
        return True


class _LlamaCppTarget:
    """A GGUF file that llama.cpp's server has loaded, on the CPU."""

    sees_all = False

    def __init__(self, case: ExportCase) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(case.out)
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = 2 * WINDOW, 1, 0
        settings.warmup = settings.fit_params = False
        settings.verbosity = -1
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.flash_attn_type = disabled
        self.library = f"llama.cpp (xllamacpp {version('xllamacpp')})"
        self._rows = case.config.model.vocab_size
        self._server = xllamacpp.Server(settings)
        self._plain = self.text_ids("a")[-1]

    def _ask(self, path: str, **fields: Any) -> dict[str, Any]:
        request = Request(
            f"{self._server.listening_address}{path}",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def scores(self, ids: list[int]) -> torch.Tensor:
        # The token that is drawn is forced, since one that is half a character has no scores.
        said = self._ask(
            "/completion",
            prompt=ids,
            n_predict=1,
            n_probs=self._rows,
            logit_bias=[[self._plain, 1e4]],
            cache_prompt=False,
        )
        made = torch.full((1, self._rows), math.nan)
        for each in said["completion_probabilities"][0]["top_logprobs"]:
            made[0, each["id"]] = each["logprob"]
        return made

    def text_ids(self, text: str) -> list[int]:
        return self._ask("/tokenize", content=text, add_special=True)["tokens"]

    def chat_ids(self, messages: list[dict[str, str]], arguments: dict[str, Any]) -> list[int]:
        made = self._ask("/apply-template", messages=messages, chat_template_kwargs=arguments)
        said = self._ask("/tokenize", content=made["prompt"], add_special=True, parse_special=True)
        return said["tokens"]

    def stops_at(self, token: int) -> bool:
        said = self._ask(
            "/completion", prompt=[self._plain], n_predict=1, logit_bias=[[token, 1e4]]
        )
        return bool(said["stop_type"] == "eos")
