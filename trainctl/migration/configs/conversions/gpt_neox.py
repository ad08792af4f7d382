"""Model, schedule, data and machines of GPT-NeoX, whose files are merged before."""

from __future__ import annotations

from json import dumps, loads
from math import ceil, exp, sqrt
from pathlib import Path
from typing import Any

from trainctl.migration.configs.conversions.deepspeed import convert_section
from trainctl.migration.configs.conversions.sections import missing_vocabulary, set_shape
from trainctl.migration.configs.conversions.trainer import set_ends
from trainctl.migration.configs.import_table import Conversion, is_number
from trainctl.migration.configs.result import Why

GATED = ("geglu", "reglu", "bilinear", "swiglu", "glu")
"""Activations with a gate, whose width counts two thirds (megatron/model/transformer.py)."""

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def model(source: Conversion) -> None:
    """Convert the shape: a Llama, Mistral or GPT-2, or what else it would be in transformers."""
    has_shape = all(source.count(name) for name in SHAPE[:3])
    family, lacking = _family(source) if has_shape else ("", "")
    if lacking or not has_shape:
        source.set("model", "hf")
        reason = f"there is no closed form with {lacking}" if lacking else "the shape is not whole"
        nearest = _as_neox(source) if has_shape else "model=hf model.path=DIR"
        for name in source.keys_of("gpt_neox.model"):
            source.leave(name, reason, nearest)
            nearest = ""
        return
    heads, hidden = source.count("num_attention_heads"), source.count("hidden_size")
    shape: dict[str, Any] = {
        "name": f"{family}-{source.count('num_layers')}x{hidden}",
        "hidden_size": hidden,
        "intermediate_size": feed_forward_width(source),
        "num_layers": source.count("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.count("num_kv_heads") or heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": source.count("max_position_embeddings")
        or source.count("seq_length")
        or 2048,
        "tie_word_embeddings": not source.is_on("no_weight_tying"),
    }
    if family == "gpt2":
        shape["norm_epsilon"] = source.number("layernorm_epsilon")
        if source.given("activation"):
            source.leave("activation")
    else:
        shape["norm_epsilon"] = source.number("rms_norm_epsilon")
        shape["rope_theta"] = float(source.number("rotary_emb_base") or 10000)
    if family == "mistral":
        shape["sliding_window"] = source.count("sliding_window_width") or None
    set_shape(source, family, shape, "num_layers")


FAMILIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "norm": ("rmsnorm", "te_rmsnorm"),
        "pos_emb": ("rotary",),
        "rotary_pct": (1,),
        "activation": ("swiglu",),
        "use_bias_in_norms": (False,),
        "use_bias_in_attn_linear": (False,),
        "use_bias_in_mlp": (False,),
    },
    "gpt2": {
        "norm": ("layernorm", "te_layernorm"),
        "pos_emb": ("learned",),
        "activation": ("gelu",),
        "use_bias_in_norms": (True,),
        "use_bias_in_attn_linear": (True,),
        "use_bias_in_mlp": (True,),
        "no_weight_tying": (False,),
        "num_kv_heads": (None,),
    },
}
"""Values of NeoX's keys that make each closed-form family."""

PLAIN: dict[str, tuple[Any, ...]] = {
    "gpt_j_residual": (False,),
    "gpt_j_tied": (False,),
    "use_qk_layernorm": (False,),
    "opt_pos_emb_offset": (0,),
    "moe_num_experts": (None, 1),
}
"""Values that every closed form needs."""


def _family(source: Conversion) -> tuple[str, str]:
    """Return the nearest closed-form family, and what the shape has that it lacks."""
    lacking = {
        family: [
            f"{key}={source.get(key)}"
            for key, values in {**wanted, **PLAIN}.items()
            if source.get(key) not in values
        ]
        for family, wanted in FAMILIES.items()
    }
    family = min(lacking, key=lambda each: len(lacking[each]))
    is_mistral = family == "llama" and source.given("sliding_window_width")
    return "mistral" if is_mistral else family, ", ".join(lacking[family])


def feed_forward_width(source: Conversion) -> int:
    """Return the width of the feed-forward layers.

    With a gate NeoX takes two thirds of the width, and rounds up to `mlp_multiple_of`
    (megatron/model/transformer.py, ParallelMLP).
    """
    factor = source.number("expansion_factor") or 4
    width = source.count("intermediate_size") or int(factor * source.count("hidden_size"))
    multiple = source.count("mlp_multiple_of") or 1
    if source.get("activation") not in GATED:
        return 2 * multiple * ceil(width / (2 * multiple))
    return multiple * ceil(int(width * 2 / 3) // 2 / multiple)


def _as_neox(source: Conversion) -> str:
    """Return what to write into a config.json, if transformers' GPTNeoX has the shape."""
    get = source.get
    is_neox = (
        get("norm") == "layernorm"
        and get("pos_emb") == "rotary"
        and get("activation") == "gelu"
        and not get("gpt_j_tied")
        and not source.given("num_kv_heads")
        and all(get(f"use_bias_in_{part}") for part in ("norms", "attn_linear", "mlp"))
    )
    if not is_neox:
        return "model=hf model.path=DIR, for an architecture of transformers"
    config = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        **{key: get(key) for key in SHAPE},
        "num_hidden_layers": get("num_layers"),
        "intermediate_size": feed_forward_width(source),
        "rotary_pct": get("rotary_pct"),
        "use_parallel_residual": bool(get("gpt_j_residual")),
        "tie_word_embeddings": get("no_weight_tying") is not True,
        "layer_norm_eps": get("layernorm_epsilon"),
        "vocab_size": _vocabulary(source)[0],
    }
    del config["num_layers"]
    written = {key: value for key, value in config.items() if value is not None}
    return f"model=hf model.path=DIR with a config.json of {dumps(written)}"


def vocabulary(source: Conversion) -> None:
    """Convert the padded size of the vocabulary, which NeoX finds by the tokenizer."""
    size, why = _vocabulary(source)
    if source.converted.choices.get("model") == "hf":
        source.ignore(
            "the model's directory says it", "padded_vocab_size", "make_vocab_size_divisible_by"
        )
    elif size is None:
        missing_vocabulary(source, why)
    else:
        name = "padded_vocab_size"
        name = name if source.given(name) else "make_vocab_size_divisible_by"
        source.set("model.vocab_size", size, name)


VOCABULARIES = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "CharLevelTokenizer": 512}
"""Number of tokens of the tokenizers that have a fixed one (megatron/tokenizer/tokenizer.py)."""


def _vocabulary(source: Conversion) -> tuple[int | None, str]:
    """Return the padded size of the vocabulary; None with the reason if nothing says it."""
    if source.count("padded_vocab_size"):
        return source.count("padded_vocab_size"), ""
    kind = str(source.get("tokenizer_type"))
    size = VOCABULARIES.get(kind)
    if size is None:
        file = source.get("vocab_file")
        if file is None:
            return None, f"{kind} needs vocab_file"
        size = _count_tokens(source.folder / str(file))
        if size is None:
            return None, f"{file} is no readable tokenizer.json"
    multiple = source.count("make_vocab_size_divisible_by") * source.count("model_parallel_size")
    return multiple * ceil(size / multiple), ""


def _count_tokens(file: Path) -> int | None:
    """Return the number of tokens of a tokenizer.json; None if it is none."""
    try:
        raw = loads(file.read_text(encoding="utf-8"))
        ids = {*raw["model"]["vocab"], *(each["content"] for each in raw["added_tokens"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return len(ids)


def attention(source: Conversion) -> None:
    """Convert the kinds of attention of the blocks: flash or global for all of them."""
    layers = source.get("attention_config")
    if layers is None:
        return
    entries = layers if isinstance(layers, list) else []
    named = [each[0] for each in entries if isinstance(each, list) and each]
    kinds = {str(kind) for each in named for kind in (each if isinstance(each, list) else [each])}
    if kinds == {"flash"}:
        source.set("model.attention", "flash_attention_2", "attention_config")
    elif kinds == {"global"}:
        source.set("model.attention", "sdpa", "attention_config")
    else:
        source.leave(
            "attention_config",
            f"blocks attend to all that is before: there is no {', '.join(sorted(kinds))}",
            "model.attention=flash_attention_2",
        )


def initial_weights(source: Conversion) -> None:
    """Convert the spread of the first weights, which is one for all matrices here."""
    method, width = source.get("init_method"), source.count("hidden_size")
    if source.converted.choices.get("model") == "hf":
        for name in source.keys_of("gpt_neox.initial_weights"):
            source.leave(name, "the model's code draws its weights", "model.weights=random")
        return
    if method == "normal":
        source.set("model.initializer_range", source.number("init_method_std"), "init_method_std")
    elif method == "small_init" and width:
        # Transformers without Tears (arXiv:1910.05895): sqrt(2 / 5 width).
        source.set("model.initializer_range", round(sqrt(2 / (5 * width)), 6), "init_method")
    else:
        source.leave("init_method", f"there is no {method}", "model.initializer_range=0.02")
    source.leave("output_layer_init_method")


def parallelism(source: Conversion) -> None:
    """Convert the pipeline, which 0 switches off, and Megatron's sequence parallelism."""
    stages = source.count("pipe_parallel_size") or 1
    source.set("parallelism.pipeline", stages, "pipe_parallel_size")
    if source.is_on("sequence_parallel") and source.count("model_parallel_size") > 1:
        source.set("parallelism.sequence_sharded_norms", True, "sequence_parallel")


def batch(source: Conversion) -> None:
    """Convert the accumulation: 1, unless the whole batch is given."""
    name = "gradient_accumulation_steps"
    steps = source.count(name)
    if steps or not source.given("train_batch_size"):
        source.set("training.gradient_accumulation_steps", steps or 1, name)


def length(source: Conversion) -> None:
    """Convert the length of the run, in steps or epochs."""
    epochs = source.number("train_epochs")
    if source.count("train_iters"):
        source.set("training.steps", source.count("train_iters"), "train_iters")
    elif epochs and epochs > 0:
        source.set("training.epochs", float(epochs), "train_epochs")


OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "cpu_adam": "adamw",
    "cpu_torch_adam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "lamb": "lamb",
    "muon": "muon",
}
"""Option for each optimizer; NeoX's Adam decays weights apart from the gradient, as AdamW does."""


def optimizer(source: Conversion) -> None:
    """Convert the optimizer and its constants."""
    kind = str(source.get("optimizer.type")).lower()
    option = OPTIMIZERS.get(kind)
    if option is None:
        source.leave("optimizer.type", f"there is no optimizer {kind}", "optimizer=adamw")
        option = "adamw"
    elif option == "adamw" and source.is_on("use_bnb_optimizer"):
        option = "adamw_8bit"
    source.set("optimizer", option, "optimizer.type")
    if kind.startswith("cpu_"):
        source.set("offload", "cpu")
    if option in ("adamw", "adamw_8bit", "lamb", "lion"):
        betas = source.get("optimizer.params.betas")
        for key, value in zip(("beta1", "beta2"), betas if is_pair(betas) else (), strict=False):
            source.set(f"optimizer.{key}", float(value), "optimizer.params.betas")
        if option != "lion":
            epsilon = source.number("optimizer.params.eps")
            source.set("optimizer.epsilon", epsilon, "optimizer.params.eps")
    if option == "sgd":
        momentum = source.number("optimizer.params.momentum") or 0.0
        source.set("optimizer.momentum", momentum, "optimizer.params.momentum")


def is_pair(value: Any) -> bool:
    """Return True if a value is a list of two numbers."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


SCHEDULES = ("cosine", "linear", "constant", "exponential")


def schedule(source: Conversion) -> None:
    """Convert shape, end and warmup of the learning rate (megatron/learning_rates.py)."""
    style, peak = str(source.get("lr_decay_style")), source.number("optimizer.params.lr")
    lowest = source.number("min_lr") or 0.0
    source.set("schedule", style if style in SCHEDULES else "cosine", "lr_decay_style")
    if style not in SCHEDULES:
        source.leave("lr_decay_style", f"there is no schedule {style}", "schedule=cosine")
    elif style != "constant" and peak and peak > 0:
        ratio = max(0.0, lowest / peak)
        if style == "exponential":
            ratio = max(exp(-0.693), ratio)
        source.set("schedule.floor_ratio", round(ratio, 9), "min_lr")
        if style == "linear" and lowest > 0:
            source.leave("min_lr")
        elif style == "exponential" and ratio > exp(-0.693):
            source.leave("min_lr", "the curve falls to the lowest rate; there it is cut off at it")
    set_ends(source)
    _schedule_end(source)
    if source.given("warmup_iters"):
        source.set("schedule.warmup_steps", source.count("warmup_iters"), "warmup_iters")
    else:
        source.set("schedule.warmup_fraction", float(source.number("warmup") or 0), "warmup")


def _schedule_end(source: Conversion) -> None:
    """Leave out an end of the schedule that is not the end of the run."""
    end, steps = source.get("lr_decay_iters"), source.get("train_iters")
    nearest = "schedule=wsd, or training.steps=N with training.stop_after_steps=M"
    if end is not None and end == steps:
        source.leave("lr_decay_iters", "the schedule ends with the run", why=Why.ignored)
    elif end is not None:
        source.leave("lr_decay_iters", "the schedule ends with the run", nearest)
    for name in ("lr_decay_fraction", "decay_lr_to"):
        if source.given(name):
            is_whole = name == "lr_decay_fraction" and source.get(name) == 1
            why = Why.ignored if is_whole else Why.left
            source.leave(name, "the schedule ends with the run", nearest, why)


def zero(source: Conversion) -> None:
    """Convert ZeRO's section, as that of a DeepSpeed JSON."""
    name = "zero_optimization.stage"
    if any(key.startswith("zero_optimization.") for key in source.leaves):
        convert_section(source, "zero_optimization", "zero_stage", "offload")
    elif source.get("zero_stage") in (1, 2, 3):
        source.set("zero_stage", str(source.get("zero_stage")), "zero_stage")
    else:
        name = "zero_stage"
        source.set("zero_stage", "0", name)
    is_16_bit = source.converted.choices.get("precision") != "fp32"
    if source.converted.choices.get("zero_stage") == "0" and is_16_bit:
        source.set("zero_stage", "1")
        source.leave(name, "in 16 bits stage 1 computes what stage 0 does there", "zero_stage=1")


PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "fp32": "fp32"}


def precision(source: Conversion) -> None:
    """Convert the number format: a key of its own, or that of DeepSpeed's sections."""
    if source.given("precision"):
        wanted = PRECISIONS.get(str(source.get("precision")))
        if wanted is None:
            source.leave("precision", f"there is no {source.get('precision')}", "precision=bf16")
        else:
            source.set("precision", wanted, "precision")
    elif source.is_on("bf16.enabled") or source.get("fp16.type") == "bfloat16":
        source.set("precision", "bf16", "bf16.enabled")
    elif source.is_on("fp16.enabled"):
        source.set("precision", "fp16", "fp16.enabled")
    else:
        source.set("precision", "fp32")


def loss_scale(source: Conversion) -> None:
    """Convert the loss scale, which fp16 alone has."""
    for name in source.keys_of("gpt_neox.loss_scale"):
        if source.converted.choices.get("precision") == "fp16":
            source.copy(source.table.canonical(name).replace("fp16.", "precision."), name)
        else:
            source.ignore("the format has no loss scale", name)


def recomputation(source: Conversion) -> None:
    """Convert the recomputation of blocks."""
    names = ("checkpoint_num_layers", "partition_activations", "checkpoint_in_cpu")
    if not source.is_on("checkpoint_activations"):
        source.set("activation_checkpointing", "none", "checkpoint_activations")
        source.ignore("nothing is recomputed", *names)
        return
    mode = "offloaded" if source.is_on("checkpoint_in_cpu") else "full"
    source.set("activation_checkpointing", mode, "checkpoint_activations")
    if source.is_on("partition_activations"):
        if source.converted.settings.get("parallelism.sequence_sharded_norms"):
            source.ignore("the sequence is divided already", "partition_activations")
        elif source.count("model_parallel_size") > 1:
            key = "activation_checkpointing.partition_across_tensor_ranks"
            source.set(key, True, "partition_activations")
        else:
            source.ignore("there are no tensor ranks", "partition_activations")
    if source.count("checkpoint_num_layers") != 1:
        source.leave("checkpoint_num_layers")


def data(source: Conversion) -> None:
    """Convert the token files, which NeoX names without `.bin`, and what is held out of them."""
    source.set("data", "tokens")
    name = "train_data_paths" if source.given("train_data_paths") else "data_path"
    paths = [f"{path}.bin" for path in source.texts(name)]
    shares = _shares(source.get("train_data_weights"), len(paths))
    if shares:
        mixture = {
            f"source{number}": {"kind": "tokens", "paths": [path], "weight": share}
            for number, (path, share) in enumerate(zip(paths, shares, strict=True), start=1)
        }
        source.set("data.sources", mixture, "train_data_weights")
    else:
        if paths:
            source.set("data.paths", paths, name)
        if source.given("train_data_weights"):
            source.leave("train_data_weights", "there is not one weight for each path")
    held_out = [f"{path}.bin" for path in source.texts("valid_data_paths")]
    if held_out and not shares:
        source.set("data.held_out_paths", held_out, "valid_data_paths")
    elif held_out:
        source.leave("valid_data_paths")
    else:
        _split(source)


def _shares(weights: Any, count: int) -> list[float]:
    """Return weights that sum to 1; none unless there is one for each path."""
    is_whole = isinstance(weights, list) and len(weights) == count and all(map(is_number, weights))
    if not is_whole or sum(weights) <= 0:
        return []
    shares = [round(weight / sum(weights), 6) for weight in weights]
    return [*shares[:-1], round(1 - sum(shares[:-1]), 6)]


def _split(source: Conversion) -> None:
    """Convert the parts `train, valid, test`: the second is held out."""
    try:
        parts = [float(part) for part in str(source.get("split")).replace("/", ",").split(",")]
        share = round([*parts, 0.0][1] / sum(parts), 6)
    except (ValueError, ZeroDivisionError):
        source.leave("split", "it is no list of parts", "data.held_out_fraction=0.03")
    else:
        source.set("data.held_out_fraction", share, "split")


def evaluation(source: Conversion) -> None:
    """Convert the size of an evaluation, from steps of the whole batch to samples."""
    steps, whole = source.count("eval_iters"), source.count("train_batch_size")
    if whole:
        source.set("training.evaluation_samples", steps * whole, "eval_iters")
    else:
        source.leave(
            "eval_iters",
            f"evaluations are counted in samples: {steps} times the global batch",
            "training.evaluation_samples=N",
        )


def saving(source: Conversion) -> None:
    """Convert the steps between checkpoints."""
    every = source.count("checkpoint_factor")
    if source.get("checkpoint_scale") != "linear":
        for name in filter(source.given, ("checkpoint_scale", "checkpoint_factor")):
            source.leave(name, "intervals are even", "checkpoint.every_steps=N")
    elif every:
        source.set("checkpoint.every_steps", every, "checkpoint_factor")
        source.set("checkpoint.every_minutes", None)


GPT2 = ("GPT2BPETokenizer", "HFGPT2Tokenizer")
OF_GPT2 = "hf download openai-community/gpt2 --local-dir DIR, and tokenizer.path=DIR"


def tokenizer(source: Conversion) -> None:
    """Convert the tokenizer; token files need it to find the end of a document, and to sample."""
    kind, file = str(source.get("tokenizer_type")), source.get("vocab_file")
    if kind == "HFTokenizer" and file:
        source.set("tokenizer", "file", "tokenizer_type")
        source.set("tokenizer.path", str(file), "vocab_file")
        return
    source.set("tokenizer", "hf")
    reason, nearest = f"there is no {kind}", "tokenizer=hf tokenizer.path=DIR"
    if kind == "HFTokenizer":
        reason, nearest = "vocab_file is not set", "tokenizer=file tokenizer.path=FILE"
    elif kind in GPT2:
        reason, nearest = "a tokenizer is a directory of transformers or a tokenizer.json", OF_GPT2
    for name in filter(source.given, ("tokenizer_type", "vocab_file", "merge_file")):
        source.leave(name, reason, nearest)


def objective(source: Conversion) -> None:
    """Convert the objective: next tokens, DPO or KTO."""
    kind = str(source.get("train_impl"))
    if kind in ("dpo", "kto"):
        source.set("objective", kind, "train_impl")
        source.set("objective.beta", source.number(f"{kind}_beta"), f"{kind}_beta")
        source.set("data", "preferences" if kind == "dpo" else "answers")
        for key in ("data.paths", "data.sources", "data.held_out_paths"):
            source.converted.settings.pop(key, None)
    elif kind != "normal":
        source.leave("train_impl", f"there is no objective {kind}", "objective=dpo")
    for name in ("desirable_weight", "undesirable_weight"):
        if kind == "kto":
            source.set(f"objective.{name}", source.number(f"kto_{name}"), f"kto_{name}")
    for name in ("dpo_beta", "kto_beta", "kto_desirable_weight", "kto_undesirable_weight"):
        if not name.startswith(kind):
            source.ignore(f"train_impl is not {name[:3]}", name)


def trackers(source: Conversion) -> None:
    """Convert the loggers that are switched on."""
    names = []
    if source.given("tensorboard_dir"):
        names.append("tensorboard")
    if source.is_on("use_wandb"):
        names.append("wandb")
    source.set("logging.to", names, "use_wandb" if "wandb" in names else "tensorboard_dir")
    if source.is_on("use_comet"):
        source.leave("use_comet", "there is no logger comet", "logging.to=[wandb]")


def profile(source: Conversion) -> None:
    """Convert the steps that are profiled."""
    if source.is_on("profile"):
        steps = [source.count(f"profile_step_{part}") for part in ("start", "stop")]
        source.set("logging.profile_steps", steps, "profile")


LAUNCHERS = {"pdsh": "ssh", "openmpi": "mpi", "mvapich": "mpi", "mpich": "mpi", "slurm": "slurm"}


def machines(source: Conversion) -> None:
    """Convert launcher, hosts and devices."""
    launcher = LAUNCHERS.get(str(source.get("launcher")).lower())
    if source.is_on("deepspeed_slurm"):
        launcher = "slurm"
    elif source.is_on("deepspeed_mpi"):
        launcher = "mpi"
    elif launcher is None and source.given("launcher"):
        source.leave("launcher", f"there is no launcher {source.get('launcher')}", "launcher=ssh")
    if launcher is None and source.given("hostfile"):
        launcher = "ssh"
    if launcher is not None:
        source.set("launcher", launcher, "launcher" if source.given("launcher") else "hostfile")
    for name, ours in (("num_nodes", "nodes"), ("num_gpus", "devices_per_node")):
        if source.count(name):
            source.set(f"hardware.{ours}", source.count(name), name)
        else:
            source.ignore("all that there are", name)
    keys = {
        "hostfile": {"ssh": "launcher.hostfile", "mpi": "launcher.mpi_hostfile"},
        "include": {"ssh": "launcher.include"},
        "exclude": {"ssh": "launcher.exclude"},
        "account": {"slurm": "launcher.slurm_account"},
    }
    for name, by_launcher in keys.items():
        key = by_launcher.get(launcher or "")
        if key:
            source.copy(key, name)
        elif source.given(name):
            nearest = next(iter(by_launcher))
            source.leave(name, f"launcher={launcher or 'local'} has none", f"launcher={nearest}")
