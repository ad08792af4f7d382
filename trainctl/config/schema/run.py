"""Data, tokenizer, length of training, checkpoints and logging of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from trainctl.config.registry import load_spec
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


class HeldOutBy(Enum):
    """Unit of text that is held out as a whole."""

    record = "record"
    file = "file"


class BeginDocuments(Enum):
    """Ids that are put before a text."""

    tokenizer = "tokenizer"
    none = "none"
    cls = "cls"


class OnTooLong(Enum):
    """Policy for a conversation that is longer than a sample."""

    cut = "cut"
    drop = "drop"
    error = "error"


class DataExecutor(Enum):
    """Executor of the tasks that prepare a corpus."""

    local = "local"
    ray = "ray"
    slurm = "slurm"


class Dedup(Enum):
    """Criterion by which a document is a copy of another one."""

    none = "none"
    exact = "exact"
    minhash = "minhash"
    substring = "substring"


DEDUP_THRESHOLDS = {Dedup.minhash: 0.8, Dedup.substring: 0.5}
"""Default similarity from which a document is dropped."""


def _divides_files(data: Any) -> bool:
    return data.held_out_fraction > 0 and not getattr(data, "held_out_paths", ())


@dataclass
class DataConfig:
    """Corpus: source of its text, held-out part, and order."""

    units: ClassVar[str] = "data"

    kind: str = option("stdlib", "Format or origin of the training text.", units="data")
    held_out_fraction: float = option(
        0.05,
        "Fraction of the documents held out for evaluation; of the text's end if there is a "
        "single document.",
        minimum=0,
        maximum=0.5,
    )
    held_out_by: HeldOutBy = option(
        HeldOutBy.record,
        "Choice of the held-out part: record (documents of all files, by their text) or file "
        "(whole files, by their names). Of token ids, record is the last documents of each file.",
        needs=(_divides_files, "data.held_out_fraction above 0, and no data.held_out_paths"),
        former="file",
    )
    held_out_seed: int = option(
        0,
        "Seed of the choice of held-out documents. The same seed holds out the same documents, "
        "however files and ranks divide them, and whatever training.seed is.",
        minimum=0,
        needs=(_divides_files, "data.held_out_fraction above 0, and no data.held_out_paths"),
    )
    on_bad_text: OnBadText = option(
        OnBadText.error,
        "Handling of text that is not UTF-8: error ends the launch and names file and line; "
        "replace substitutes U+FFFD; skip drops the document, and also JSONL lines without text.",
    )
    max_bytes: int | None = option(
        None,
        "Maximum amount of text to read, in file order; none reads all. Named held-out files "
        "have a limit of their own.",
        unit="bytes",
        minimum=1,
    )
    shuffle: bool = option(
        True, "Shuffle samples by a pseudo-random function of (seed, sample counter).", whole=True
    )
    mask_documents: bool = option(
        False,
        "Restrict attention, and position ids, to one document of a packed sample.",
        whole=True,
    )
    packing: Packing = option(
        Packing.stream,
        "Packing of documents into samples: stream concatenates them and cuts at sample "
        "boundaries; best_fit splits no document that fits into a sample (arXiv:2404.10830), and "
        "pads.",
        whole=True,
    )
    on_too_long: OnTooLong = option(
        OnTooLong.cut,
        "Handling of a conversation longer than training.sequence_length: cut keeps its "
        "beginning, drop leaves it out, error ends the launch; the number affected is reported.",
        needs=(
            lambda data: any(
                load_spec("data", each.kind).encoder for each in data.sources.values() or [data]
            ),
            "data=chat",
        ),
        whole=True,
    )
    begin_documents: BeginDocuments = option(
        BeginDocuments.tokenizer,
        "Ids before each document, and before each prompt that is a text: tokenizer (what the "
        "tokenizer's post-processor puts before a text, such as its bos_token), none, or cls (its "
        "cls_token alone, and nothing before prompts, as versions before this key). A chat "
        "template begins conversations itself.",
        needs=(
            lambda data: load_spec("data", data.kind).begins_texts,
            "a kind of data whose texts are tokenized and are no conversations",
        ),
        former="cls",
    )
    separator: str = option(
        "",
        "Text appended to each document, before the tokenizer's end-of-document token.",
        example='"\\n\\n"',
    )
    fim_rate: float = option(
        0.0,
        "Fraction of the training documents rearranged for fill-in-the-middle "
        "(arXiv:2207.14255), drawn anew in each epoch.",
        minimum=0,
        maximum=1,
    )
    fim_spm_rate: float = option(
        0.5,
        "Fraction of the fill-in-the-middle documents in suffix-prefix-middle order.",
        minimum=0,
        maximum=1,
    )
    fim_tokens: list[str] = option(
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        "Fill-in-the-middle tokens that mark prefix, middle and suffix.",
    )
    factory: str | None = option(
        None,
        "Your own function that yields the documents, as module:function, in place of `kind`.",
        whole=True,
    )
    filters: dict[str, Any] = option(
        {},
        "Quality filters that a document must pass, by name, each with its keys: gopher_quality, "
        "c4, words, ...; null removes a filter.",
        example="{gopher_quality: {min_words: 40}}",
        each="filter",
    )
    dedup: Dedup = option(
        Dedup.none,
        "Remove duplicate documents, within and across sources: exact (identical text), minhash "
        "(near-duplicates) or substring (mostly passages of other documents). Held-out documents "
        "are kept.",
        whole=True,
    )
    dedup_threshold: float | None = option(
        None,
        "Similarity from which a document counts as a duplicate. minhash: Jaccard index of word "
        "5-grams, none is 0.8; substring: fraction of its words in passages of other documents, "
        "none is 0.5.",
        above=0,
        maximum=1,
        needs=(lambda data: data.dedup in DEDUP_THRESHOLDS, "data.dedup=minhash or substring"),
        whole=True,
    )
    dedup_precedence: list[str] = option(
        [],
        "Names of sources by priority: of duplicates, the document of the earliest source is "
        "kept; unnamed sources follow in the order of data.sources.",
        example="[books, web]",
        needs=(
            lambda data: data.dedup is not Dedup.none and data.sources,
            "data.dedup and data.sources",
        ),
        whole=True,
    )
    decontaminate: list[str] = option(
        [],
        "Remove training documents that share a passage with these texts: paths as in "
        "data.paths, and held_out for the run's own held-out documents.",
        example="[held_out, benchmarks/*.jsonl]",
        whole=True,
    )
    executor: DataExecutor = option(
        DataExecutor.local,
        "Where tokenizing, filters and deduplication run: local (processes of this machine), ray "
        "(tasks of a Ray cluster) or slurm (array jobs). The others need a cache that all machines "
        "share.",
        whole=True,
    )
    executor_address: str = option(
        "auto",
        "Ray cluster to run on: auto (that of this machine), HOST:PORT or ray://HOST:PORT.",
        example="ray://head:10001",
        needs=(lambda data: data.executor is DataExecutor.ray, "data.executor=ray"),
        whole=True,
    )
    executor_options: list[str] = option(
        [],
        "Options of sbatch for the array jobs, after the partition, account, qos, constraint and "
        "time of launcher=slurm.",
        example="[--partition=cpu, --mem=4G]",
        needs=(lambda data: data.executor is DataExecutor.slurm, "data.executor=slurm"),
        whole=True,
    )
    sort_bytes: int = option(
        1 << 30,
        "Memory that a process may take to sort hashes, when copies are looked for; less makes "
        "more, smaller pieces on disk.",
        unit="bytes",
        minimum=1 << 20,
        needs=(
            lambda data: data.has_quality_rules,
            "data.dedup, data.filters or data.decontaminate",
        ),
        whole=True,
    )
    sources: dict[str, SourceConfig] = option(
        {},
        "Data sources to mix, by name, in place of a single `kind`: each has the keys of its "
        "kind and weight, tokens or epochs.",
        example="{code: {paths: [code/*.jsonl], weight: 0.7}}",
        whole=True,
    )
    stages: list[StageConfig] = option(
        [],
        "Consecutive stages of the run: entries of until, until_step or until_tokens (omitted in "
        "the last), weights and sequence_length.",
        example="[{until: 0.8}, {weights: {code: 1}, sequence_length: 512}]",
        whole=True,
    )

    @property
    def has_quality_rules(self) -> bool:
        """Whether the run filters, deduplicates or decontaminates its documents."""
        sections: list[Any] = [self, *self.sources.values()]
        is_filtered = any(keys is not None for each in sections for keys in each.filters.values())
        return is_filtered or self.dedup is not Dedup.none or bool(self.decontaminate)


@dataclass
class DataFromPaths(DataConfig):
    """Keys of data kinds that read named files."""

    paths: list[str] = option(
        [],
        "Input files, as paths, globs, URLs or folders; a folder contributes the files with a "
        "suffix of the kind (.jsonl, .md and .txt for `files`), compressed or not, in it and its "
        "subfolders.",
    )
    held_out_paths: list[str] = option(
        [], "Held-out files, given as in `paths`; empty holds out a fraction of `paths`."
    )


@dataclass
class DataFromRecords(DataFromPaths):
    """Keys of data kinds that read a text under a key in each record of a file."""

    text_key: str = option("text", "Key or column of a record that contains the text.")


@dataclass
class TokenizerConfig:
    """Conversion of text to token ids."""

    units: ClassVar[str] = "tokenizer"

    kind: str = option("byte", "Tokenizer that converts text to token ids.", units="tokenizer")


@dataclass
class TokenizerFromPath(TokenizerConfig):
    """Keys of tokenizers that are read from a file."""

    path: str | None = option(
        None,
        "Tokenizer file or directory; required, except that tokenizer=hf with model=hf uses "
        "model.path.",
        local=True,
    )


@dataclass
class TrainingConfig:
    """Length of the run, batch size, and seed."""

    seed: int = option(
        1234, "Random seed, from which all randomness of the run is derived.", minimum=0
    )
    freeze: list[str] = option(
        [],
        "Parameters to freeze: regular expressions searched for in canonical names, or "
        "embeddings, head (with weights tied to it), and all_but_last_blocks:N, which is "
        "everything before the last N blocks.",
        example="[embeddings, all_but_last_blocks:2]",
    )
    deterministic: bool = option(
        False,
        "Use deterministic kernels on GPUs: slower, and an operation without one ends the run. "
        "CPU runs are always deterministic.",
    )
    steps: int | None = option(
        None,
        "Number of optimizer steps of the whole run; none derives it from tokens or epochs.",
        unit="optimizer steps",
        minimum=0,
    )
    tokens: int | None = option(
        None, "Token budget of the whole run, if steps is none.", unit="tokens", minimum=1
    )
    epochs: float | None = option(
        None,
        "Number of passes over the training text, if neither steps nor tokens is set.",
        above=0,
    )
    epoch_tokens: int | None = option(
        None,
        "Size of the training text, used with epochs; none counts it at launch.",
        unit="tokens",
        minimum=1,
    )
    stop_after_steps: int | None = option(
        None,
        "Step of the run at which this launch ends; the schedule is unchanged.",
        unit="optimizer steps",
        minimum=1,
    )
    time_limit_minutes: float | None = option(
        None,
        "Time limit of this launch: it saves and exits in time, with the exit code that a "
        "scheduler requeues (75).",
        unit="minutes",
        above=0,
    )
    sequence_length: int = option(
        2048, "Sequence length: length of a packed sample.", unit="tokens", minimum=2
    )
    global_batch_size: int | None = option(
        None, "Sequences per optimizer step, over all ranks.", unit="sequences", minimum=1
    )
    global_batch_tokens: int | None = option(
        None,
        "Tokens per optimizer step, in place of global_batch_size; rounded to whole sequences. "
        "4M is four million.",
        unit="tokens",
        minimum=1,
    )
    micro_batch_size: int | None = option(
        None, "Sequences per forward pass of one data-parallel rank.", unit="sequences", minimum=1
    )
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per optimizer step.", minimum=1
    )
    batch_ramp: list[dict[str, int]] = option(
        [],
        "Batch size ramp: a list of {until_steps or until_tokens, global_batch_size}, each up to "
        "that point of the run; training.global_batch_size applies after the last entry.",
        example="[{until_steps: 500, global_batch_size: 64}]",
        unit="optimizer steps, tokens and sequences",
    )
    evaluate_every_steps: int | None = option(
        None,
        "Interval between evaluations of the held-out loss, which is also evaluated at the end; "
        "none evaluates only at the end.",
        unit="optimizer steps",
        minimum=1,
    )
    evaluation_samples: int = option(
        64,
        "Held-out sequences per source in each evaluation; 0 switches evaluation off.",
        unit="sequences",
        minimum=0,
    )
    ema_decay: float | None = option(
        None,
        "Decay of an exponential moving average of the weights; none keeps no average. At update "
        "t it is at most (1 + t) / (10 + t).",
        above=0,
        maximum=0.9999999,
    )
    ema_every_steps: int = option(
        1,
        "Interval between updates of the moving average, in weight updates; skipped updates do "
        "not count.",
        unit="optimizer steps",
        minimum=1,
    )
    stop_patience: int | None = option(
        None,
        "Early stopping: number of consecutive evaluations without a lower held-out loss that "
        "ends the run.",
        unit="evaluations",
        minimum=1,
    )
    stop_min_delta: float = option(
        0.0,
        "Early stopping: minimum decrease of the held-out loss that counts as an improvement.",
        unit="nats",
        minimum=0,
    )
    sample_tokens: int = option(
        0, "Number of tokens sampled from the model at the end.", unit="tokens", minimum=0
    )
    sample_prompt: str = option("def ", "Prompt for the text sampled at the end.")
    sample_prompts: list[str] = option(
        [],
        "Prompts in place of sample_prompt, each completed by greedy decoding; with "
        "conversations, each is a user message formatted by the chat template.",
        example="[add 2 and 2, say hello]",
    )


@dataclass
class CheckpointConfig:
    """Schedule and retention of checkpoints."""

    every_steps: int | None = option(
        None,
        "Interval between checkpoints; none saves only by time and at the end.",
        unit="optimizer steps",
        minimum=1,
    )
    every_minutes: float | None = option(
        None,
        "Maximum time since the last checkpoint, after which another is saved.",
        unit="minutes",
        above=0,
    )
    keep: int = option(3, "Number of newest complete checkpoints to keep.", minimum=1)
    best_of: str | None = option(
        None,
        "Evaluation metric whose best checkpoint is kept too: loss, or ema_loss with "
        "training.ema_decay; smaller is better.",
    )
    at_end: bool = option(True, "Save a checkpoint when the launch ends without a failure.")
    asynchronous: bool = option(
        False,
        "Copy the state to host memory and write it in the background while training continues.",
    )
    weights_only_every_steps: int | None = option(
        None,
        "Interval between weights-only checkpoints, in the compute type: for evaluate, sample "
        "and export, not for resuming.",
        unit="optimizer steps",
        minimum=1,
    )
    weights_only_keep: int | None = option(
        None, "Number of newest weights-only checkpoints to keep; none keeps all.", minimum=1
    )
    compare_replay: bool = option(
        True, "Stop after a resume if a repeated step has a different loss than before."
    )
    mirror: str | None = option(
        None,
        "URL of a folder of this run's own in an object store (s3, gs, az) or file system (file), "
        "to which a process beside the run copies checkpoints and records; `trainctl resume URL` "
        "continues from them on any machine.",
        example="s3://bucket/runs/NAME",
    )
    mirror_bandwidth: int | None = option(
        None,
        "Maximum bytes per second to and from the mirror, which is read back for verification; "
        "none is unlimited.",
        unit="bytes",
        minimum=1 << 10,
        needs=(lambda section: section.mirror is not None, "checkpoint.mirror"),
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
        "Loggers that receive the metrics, in addition to the run's records.",
        example="[tensorboard,wandb]",
        units="logger",
    )
    python: str | None = option(
        None,
        "Python interpreter of another environment, for loggers whose packages are not installed "
        "in trainctl's.",
        example="/opt/trackers/bin/python",
        local=True,
    )
    alerts: AlertsConfig = section(AlertsConfig)
    every_steps: int = option(
        1,
        "Interval between progress lines when the output is not a terminal; records are written "
        "every step.",
        unit="optimizer steps",
        minimum=1,
    )
    profile_steps: list[int] = option(
        [], "First and last step to profile; empty switches the profiler off.", example="[10,12]"
    )
    profile_ranks: list[int] = option([0], "Ranks to profile.", example="[0,1]")
    memory_phases: bool = option(
        False, "Record the peak memory of each phase of a step, to compare with the plan."
    )
    deepspeed_level: str = option("warning", "Level of DeepSpeed's logger in the ranks' logs.")
