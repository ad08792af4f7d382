"""Data, tokenizer, length of training, checkpoints and logging of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from trainctl.config.registry import load
from trainctl.config.schema.alerts import AlertsConfig
from trainctl.config.schema.option import option, section
from trainctl.config.schema.sources import SourceConfig, StageConfig


class OnBadText(Enum):
    """Policy for text that cannot be decoded, and for lines without text."""

    error = "error"
    replace = "replace"
    skip = "skip"


class Packing(Enum):
    """Assembly of samples from documents."""

    stream = "stream"
    best_fit = "best_fit"


class OnTooLong(Enum):
    """Policy for a conversation that is longer than a sample."""

    cut = "cut"
    drop = "drop"
    error = "error"


class Dedup(Enum):
    """Criterion by which a document is a copy of another one."""

    none = "none"
    exact = "exact"
    minhash = "minhash"
    substring = "substring"


DEDUP_THRESHOLDS = {Dedup.minhash: 0.8, Dedup.substring: 0.5}
"""Default similarity from which a document is dropped."""


@dataclass
class DataConfig:
    """Corpus: source of its text, held-out part, and order."""

    units: ClassVar[str] = "data"

    kind: str = option("stdlib", "Where the text comes from.", units="data")
    held_out_fraction: float = option(
        0.05,
        "Share of the files held out for evaluation; of a single file, of its documents, and of a "
        "single document, of its end.",
        minimum=0,
        maximum=0.5,
    )
    on_bad_text: OnBadText = option(
        OnBadText.error,
        "Text that is not UTF-8: error ends the launch at its file and line; replace puts U+FFFD "
        "in its place; skip leaves out its document, and JSONL lines without a text too.",
    )
    max_bytes: int | None = option(
        None, "Read no more text than this, in file order; none reads all.", unit="bytes", minimum=1
    )
    shuffle: bool = option(
        True, "Order is a pseudo-random function of (seed, sample counter).", whole=True
    )
    mask_documents: bool = option(
        False, "Attend, and count positions, only within a document of a packed sample.", whole=True
    )
    packing: Packing = option(
        Packing.stream,
        "How documents become samples: stream cuts them one after the other; best_fit cuts none "
        "that fits (arXiv:2404.10830), and pads.",
        whole=True,
    )
    on_too_long: OnTooLong = option(
        OnTooLong.cut,
        "A conversation longer than training.sequence_length: cut keeps its beginning, drop leaves "
        "it out, error ends the launch; how many is said.",
        needs=(
            lambda data: any(
                load("data", each.kind).encoder for each in data.sources.values() or [data]
            ),
            "data=chat",
        ),
        whole=True,
    )
    separator: str = option(
        "",
        "Text put after each document, before the tokenizer's end of a document.",
        example='"\\n\\n"',
    )
    fim_rate: float = option(
        0.0,
        "Share of the training documents whose middle comes last (arXiv:2207.14255), others in "
        "each epoch.",
        minimum=0,
        maximum=1,
    )
    fim_spm_rate: float = option(
        0.5, "Share of these in which the suffix comes before the prefix.", minimum=0, maximum=1
    )
    fim_tokens: list[str] = option(
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        "Tokens that announce prefix, middle and suffix.",
    )
    factory: str | None = option(
        None,
        "Your own function that gives the documents, as module:function, instead of `kind`.",
        whole=True,
    )
    filters: dict[str, Any] = option(
        {},
        "Rules that a document must meet, by the names of filters, each with its keys: "
        "gopher_quality, c4, words, ...; null takes one out.",
        example="{gopher_quality: {min_words: 40}}",
        each="filter",
    )
    dedup: Dedup = option(
        Dedup.none,
        "Leave copies out, within and across sources: exact (the same text), minhash (nearly the "
        "same) or substring (mostly passages of others). What is held out stays.",
        whole=True,
    )
    dedup_threshold: float | None = option(
        None,
        "From which likeness a document goes. minhash: Jaccard index of word 5-grams, none 0.8; "
        "substring: share of its words in passages of others, none 0.5.",
        above=0,
        maximum=1,
        needs=(lambda data: data.dedup in DEDUP_THRESHOLDS, "data.dedup=minhash or substring"),
        whole=True,
    )
    dedup_precedence: list[str] = option(
        [],
        "Sources by name, those first whose documents stay; the others follow as data.sources has "
        "them.",
        example="[books, web]",
        needs=(
            lambda data: data.dedup is not Dedup.none and data.sources,
            "data.dedup and data.sources",
        ),
        whole=True,
    )
    decontaminate: list[str] = option(
        [],
        "Leave out what has a passage of these texts: paths as in data.paths, and held_out for "
        "what the run itself holds out.",
        example="[held_out, benchmarks/*.jsonl]",
        whole=True,
    )
    sources: dict[str, SourceConfig] = option(
        {},
        "Sources that are mixed, by name, instead of the one of `kind`: each has the keys of its "
        "kind and weight, tokens or epochs.",
        example="{code: {paths: [code/*.jsonl], weight: 0.7}}",
        whole=True,
    )
    stages: list[StageConfig] = option(
        [],
        "Parts of the run, one after the other: entries of until, until_step or until_tokens (the "
        "last has none), weights and sequence_length.",
        example="[{until: 0.8}, {weights: {code: 1}, sequence_length: 512}]",
        whole=True,
    )


@dataclass
class DataFromPaths(DataConfig):
    """Keys of data kinds that read named files."""

    paths: list[str] = option(
        [],
        "Globs of files, or folders: of these the files with an ending of the kind's (.jsonl, .md "
        "and .txt with `files`), packed or not, and those of the folders in them. URLs, too.",
    )
    held_out_paths: list[str] = option(
        [], "The same of the held-out files; empty holds out a share of `paths`."
    )


@dataclass
class DataFromRecords(DataFromPaths):
    """Keys of data kinds that read a text under a key in each record of a file."""

    text_key: str = option("text", "Key of the text in a record, such as a JSONL object.")


@dataclass
class TokenizerConfig:
    """Conversion of text to token ids."""

    units: ClassVar[str] = "tokenizer"

    kind: str = option("byte", "What makes token ids of text.", units="tokenizer")


@dataclass
class TokenizerFromPath(TokenizerConfig):
    """Keys of tokenizers that are read from a file."""

    path: str | None = option(
        None,
        "File or directory; required, but for tokenizer=hf with model=hf: that of model.path.",
        local=True,
    )


@dataclass
class TrainingConfig:
    """Length of the run, batch size, and seed."""

    seed: int = option(1234, "Everything random is a function of it.", minimum=0)
    freeze: list[str] = option(
        [],
        "Weights that stay as they are: regular expressions that are found in canonical names, or "
        "embeddings, head (with what it is tied to), and all_but_last_blocks:N, which is all that "
        "comes before the last N blocks.",
        example="[embeddings, all_but_last_blocks:2]",
    )
    deterministic: bool = option(
        False,
        "Compute every sum in a fixed order on GPUs too: slower, and an operation that cannot "
        "ends the run. On a CPU it is so anyway.",
    )
    steps: int | None = option(
        None,
        "Optimizer steps of the whole run; none derives it from tokens or epochs.",
        unit="optimizer steps",
        minimum=0,
    )
    tokens: int | None = option(
        None, "Token budget of the whole run, if steps is none.", unit="tokens", minimum=1
    )
    epochs: float | None = option(
        None,
        "Passes over the training text in the whole run, if neither steps nor tokens is given.",
        above=0,
    )
    epoch_tokens: int | None = option(
        None,
        "Length of the training text, for epochs; none has it counted when the run is launched.",
        unit="tokens",
        minimum=1,
    )
    stop_after_steps: int | None = option(
        None,
        "End this launch at this step of the run; the schedule is unchanged.",
        unit="optimizer steps",
        minimum=1,
    )
    time_limit_minutes: float | None = option(
        None,
        "Save and end in time before this launch has lasted so long, with the exit code that "
        "a scheduler requeues (75).",
        unit="minutes",
        above=0,
    )
    sequence_length: int = option(2048, "Length of a packed sample.", unit="tokens", minimum=2)
    global_batch_size: int | None = option(
        None, "Sequences in an optimizer step, over all ranks.", unit="sequences", minimum=1
    )
    global_batch_tokens: int | None = option(
        None,
        "Tokens in an optimizer step, in place of global_batch_size, which it is rounded to; 4M is "
        "four million.",
        unit="tokens",
        minimum=1,
    )
    micro_batch_size: int | None = option(
        None,
        "Sequences in one forward pass of one data-parallel rank.",
        unit="sequences",
        minimum=1,
    )
    gradient_accumulation_steps: int | None = option(
        None, "Forward and backward passes in an optimizer step.", minimum=1
    )
    batch_ramp: list[dict[str, int]] = option(
        [],
        "Smaller batches at the start: a list of {until_steps or until_tokens, "
        "global_batch_size}, each up to that point of the run; global_batch_size after the last.",
        example="[{until_steps: 500, global_batch_size: 64}]",
    )
    evaluate_every_steps: int | None = option(
        None,
        "Held-out loss at this interval and at the end; none only at the end.",
        unit="optimizer steps",
        minimum=1,
    )
    evaluation_samples: int = option(
        64,
        "Held-out sequences of each source in an evaluation; 0 switches it off.",
        unit="sequences",
        minimum=0,
    )
    ema_decay: float | None = option(
        None,
        "Keep a moving average of the weights, of which each update leaves this share; at the "
        "start less: (1 + t) / (10 + t) at update t.",
        above=0,
        maximum=0.9999999,
    )
    ema_every_steps: int = option(
        1,
        "Updates of the weights from one update of their average to the next; those that were "
        "skipped do not count.",
        unit="optimizer steps",
        minimum=1,
    )
    stop_patience: int | None = option(
        None,
        "End the run after so many evaluations in a row without a lower held-out loss.",
        unit="evaluations",
        minimum=1,
    )
    stop_min_delta: float = option(
        0.0,
        "stop_patience: how much lower the held-out loss has to be to count; less does not.",
        unit="nats",
        minimum=0,
    )
    sample_tokens: int = option(
        0, "Length of a text sampled from the model at the end.", unit="tokens", minimum=0
    )
    sample_prompt: str = option("def ", "Start of that text.")
    sample_prompts: list[str] = option(
        [],
        "In its place, texts that are each gone on with, taking the likeliest token each time; of "
        "conversations they are a user's, and the chat template asks for the answers.",
        example="[add 2 and 2, say hello]",
    )


@dataclass
class CheckpointConfig:
    """Schedule and retention of checkpoints."""

    every_steps: int | None = option(
        None,
        "Save at this interval; none only by time and at the end.",
        unit="optimizer steps",
        minimum=1,
    )
    every_minutes: float | None = option(
        None, "Save when this much time has passed since the last.", unit="minutes", above=0
    )
    keep: int = option(3, "Complete checkpoints kept, the newest first.", minimum=1)
    best_of: str | None = option(
        None,
        "Also keep the best by this metric of an evaluation: loss, or ema_loss with "
        "training.ema_decay; smaller is better.",
    )
    at_end: bool = option(True, "Save when the launch ends in good order.")
    asynchronous: bool = option(
        False, "Copy the state to host memory and write it behind the training."
    )
    weights_only_every_steps: int | None = option(
        None,
        "Save the weights alone at this interval, in the format that they are computed in: for "
        "evaluate, sample and export, never for a resume.",
        unit="optimizer steps",
        minimum=1,
    )
    weights_only_keep: int | None = option(
        None,
        "Of the weights alone, how many are kept, the newest first; none keeps all.",
        minimum=1,
    )
    compare_replay: bool = option(
        True, "After a resume, stop if a step that is done again has another loss than before."
    )

    @property
    def saves_something(self) -> bool:
        """Whether a run that is not interrupted saves any checkpoint."""
        return self.every_steps is not None or self.every_minutes is not None or self.at_end


@dataclass
class LoggingConfig:
    """Metrics, profiles and progress lines recorded during training."""

    parts: ClassVar[str] = "logger"

    to: list[str] = option(
        ["tensorboard"],
        "Where the metrics go beside `events.jsonl`: the names of loggers.",
        example="[tensorboard,csv]",
        units="logger",
    )
    python: str | None = option(
        None,
        "Python of another environment, for loggers whose packages are not in trainctl's own.",
        example="/opt/trackers/bin/python",
        local=True,
    )
    alerts: AlertsConfig = section(AlertsConfig)
    every_steps: int = option(
        1,
        "Progress lines when the output is not a terminal; records are of every step.",
        unit="optimizer steps",
        minimum=1,
    )
    profile_steps: list[int] = option(
        [],
        "First and last step that the profiler records; empty switches it off.",
        example="[10,12]",
    )
    profile_ranks: list[int] = option([0], "Ranks that it records.", example="[0,1]")
    memory_phases: bool = option(
        False, "Record the peak memory of each part of a step beside what was planned."
    )
    deepspeed_level: str = option("warning", "Level of DeepSpeed's own log in the ranks' logs.")
