"""Every rule fires on the config that it is for, and on no legal one."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
from anatomies import SMALL
from plan_cases import config_with, cpus, gpus

from trainctl.config.keys import find_leaf
from trainctl.config.schema import DataType, Packing
from trainctl.errors import Severity
from trainctl.rules.resolve import PLAN_RULES, resolve

FP8 = {"precision__compute": "fp8"}
OFFLOAD = {"zero_stage__stage": 3, "offload__optimizer": "cpu"}
ZENFLOW = {
    "zero_stage__stage": 2,
    "offload__optimizer": "cpu",
    "offload__zenflow": True,
    "optimizer__gradient_clipping": 0.0,
}
EXPERTS = {
    "model__family": "hf",
    "model__path": "m",
    "model__num_experts": 8,
    "parallelism__expert": 2,
}
READ = {"model__family": "hf", "model__path": "m", "model__model_type": "theirs"}
NVME = {"zero_stage__stage": 3, "offload__optimizer": "nvme"}
PARTITIONED = {
    "activation_checkpointing__mode": "full",
    "activation_checkpointing__partition_across_tensor_ranks": True,
}
MUP = {"model__mup": True, "model__mup_base_width": 64}
DEEPCOMPILE = {"kernels__compile": "deepcompile", "zero_stage__stage": 3}
SAVES = {"checkpoint__every_steps": 10}
LORA = {"adapter__kind": "lora"}
NF4 = {"adapter__base_weights": "nf4"}
TWO_STAGES = {"parallelism__pipeline": 2, "zero_stage__stage": 1}
DUALPIPEV = {
    **TWO_STAGES,
    "parallelism__pipeline_schedule": "dualpipev",
    "training__gradient_accumulation_steps": 4,
}
PAIRS = {
    "objective__kind": "dpo",
    "data__kind": "preferences",
    "data__on_too_long": "drop",
    "data__mask_documents": True,
}
SHARDED = {"engine__kind": "fsdp2", "zero_stage__stage": 3}


def mixed(*stages, **sources):
    """Two sources, changed as said, and stages."""
    plain = {
        "code": {"kind": "stdlib", "weight": 0.7},
        "prose": {"kind": "files", "paths": ["a"], "weight": 0.3},
    }
    for name, changes in sources.items():
        plain[name] = {**plain.get(name, {"kind": "stdlib"}), **changes}
    return {"data__sources": plain, "data__stages": list(stages)}


# Rule, changes, hardware, part of the message, part of the hint.
MODULE = {
    "model__family": "module",
    "model__factory": "mine:model",
    "model__anatomy": [
        "model documents-joined",
        "model unsplit tensor Mine has no tensor_plan()",
        *SMALL,
    ],
}
ERRORS = [
    (
        "TC376",
        {**LORA, "adapter__targets": ["q_prj", "v_proj"]},
        gpus(),
        "no linear layer of the blocks is called 'q_prj'",
        "did you mean q_proj",
    ),
    (
        "TC377",
        {"training__freeze": ["embed_tokns"]},
        gpus(),
        "'embed_tokns' is found in no parameter's name",
        "did you mean embed_tokens",
    ),
    (
        "TC377",
        {"training__freeze": ["all_but_last_blocks:9"]},
        gpus(),
        "needs a number of blocks up to 4",
        "",
    ),
    ("TC377", {"training__freeze": ["("]}, gpus(), "not a regular expression", ""),
    ("TC378", {"training__freeze": ["."]}, gpus(), "nothing is left to train", "embeddings"),
    ("TC378", {**LORA, "training__freeze": ["norm"]}, gpus(), "already", "leave it out"),
    (
        "TC379",
        {**LORA, "model__mup": True, "model__mup_base_width": 64},
        gpus(),
        "model.mup=true with adapter=lora",
        "adapter=none",
    ),
    (
        "TC379",
        {"training__freeze": ["embeddings"], "optimizer__kind": "muon"},
        gpus(),
        "optimizer.kind=muon with training.freeze",
        "optimizer=adamw",
    ),
    (
        "TC379",
        {**LORA, "precision__autocast": True},
        gpus(),
        "precision.autocast=true with adapter=lora",
        "precision.autocast=false",
    ),
    (
        "TC379",
        {**LORA, **READ, "model__anatomy": ["model recurrent", *SMALL]},
        gpus(1),
        "model.model_type=theirs with adapter=lora: it carries a state",
        "another model",
    ),
    (
        "TC382",
        {**LORA, **NF4, "parallelism__tensor": 2},
        gpus(2),
        "parallelism.tensor=2 with adapter.base_weights=nf4",
        "parallelism.tensor=1",
    ),
    (
        "TC382",
        {**LORA, **NF4, "model__family": "gpt2"},
        gpus(),
        "the matrices of gpt2 have a row for each input",
        "adapter.base_weights=compute",
    ),
    (
        "TC383",
        {**LORA, **NF4, "model__intermediate_size": 99, "model__hidden_size": 32},
        gpus(),
        "blocks of 64 weights do not divide model.layers.0.mlp.gate_proj.weight, of 99 x 32",
        "adapter.base_weights=int8",
    ),
    (
        "TC384",
        {**LORA, "adapter__also_train": ["embed_tokns"]},
        gpus(),
        "'embed_tokns' is found in no parameter's name",
        "did you mean embed_tokens",
    ),
    (
        "TC384",
        {**LORA, "adapter__targets": ["q_proj"], "adapter__also_train": ["self_attn"]},
        gpus(),
        "'self_attn' meets model.layers.0.self_attn.q_proj.weight",
        "adapter.also_train=[embeddings,head]",
    ),
    (
        "TC380",
        {"training__freeze": ["all_but_last_blocks:1"], **TWO_STAGES},
        gpus(2),
        "stage 0 (of 2 blocks) has nothing to train",
        "parallelism.pipeline=1",
    ),
    (
        "TC380",
        {"training__freeze": ["all_but_last_blocks:2"], **DUALPIPEV},
        gpus(2),
        "stage 0 (of 1 blocks) has nothing to train, and DualPipeV",
        "parallelism.pipeline=1",
    ),
    (
        "TC380",
        {"training__freeze": ["head", "norm", r"layers\.[23]"], **TWO_STAGES},
        gpus(2),
        "stage 1 (of 2 blocks) has nothing to train",
        "stage_blocks",
    ),
    (
        "TC340",
        mixed(prose={"weight": 0.2}),
        gpus(),
        "code 0.7, prose 0.2 have the sum 0.9",
        "7 and",
    ),
    ("TC340", mixed(new={}), gpus(), "data.sources.new has no weight", "leave the source out"),
    (
        "TC340",
        mixed(code={"epochs": 2}),
        gpus(),
        "code has weight and epochs",
        "sources.code.weight",
    ),
    (
        "TC340",
        mixed({"until": 0.5}, {"weights": {"code": 1}}, code={"weight": None})
        | {"data__sources": {"code": {"kind": "stdlib"}}},
        gpus(),
        "a stage has no weights, and neither has any source",
        "weights in each stage",
    ),
    (
        "TC341",
        {**mixed(), "training__steps": None, "training__epochs": 2.0, "training__epoch_tokens": 9},
        gpus(),
        "training.epochs=2 is of one text, and data.sources has 2",
        "training.tokens=NUMBER",
    ),
    ("TC341", {**mixed(), "data__factory": "a:b"}, gpus(), "both say what is trained on", "leave"),
    (
        "TC405",
        {**SHARDED, "zero_stage__stage": 1},
        gpus(),
        "zero_stage.stage=1: engine.kind=fsdp2 has gradients and states in shards always",
        "zero_stage=2, or engine=deepspeed",
    ),
    (
        "TC405",
        {**SHARDED, "parallelism__tensor": 2},
        gpus(),
        "parallelism.tensor=2: engine.kind=fsdp2 is data parallel only",
        "parallelism.tensor=1, or engine=deepspeed",
    ),
    (
        "TC405",
        {**SHARDED, "precision__compute": "fp16"},
        gpus(),
        "precision.compute=fp16: engine.kind=fsdp2 computes in fp32 and bf16",
        "precision=bf16",
    ),
    (
        "TC405",
        {**SHARDED, "optimizer__kind": "muon"},
        gpus(),
        "optimizer.kind=muon: engine.kind=fsdp2 steps optimizers that look at one element",
        "optimizer=adamw, adam, sgd or lion",
    ),
    (
        "TC405",
        {**SHARDED, "offload__optimizer": "cpu"},
        gpus(),
        "offload.optimizer=cpu: engine.kind=fsdp2 offloads parameters, gradients and states",
        "offload=cpu-all",
    ),
    (
        "TC405",
        {**SHARDED, "deepspeed": {"steps_per_print": 7}},
        gpus(),
        "deepspeed.steps_per_print=7: engine.kind=fsdp2 passes nothing on to DeepSpeed",
        "leave deepspeed.* out",
    ),
    ("TC365", {"data__kind": "stream"}, gpus(), "data.kind=stream needs data.url", "data.url=s3:"),
    (
        "TC365",
        mixed(
            code={"kind": "stream", "url": "s3://a", "cache_bytes": 10**9, "shuffle_shards": 8},
        ),
        gpus(),
        "data.sources.code.cache_bytes=1000000000 holds less than two windows of 8 shards",
        "data.sources.code.shuffle_shards=3",
    ),
    (
        "TC361",
        mixed(code={"kind": "tokens", "paths": ["a.bin"], "max_bytes": 9}),
        gpus(),
        "data.sources.code.max_bytes=9 is of text, and data.sources.code.kind=tokens has ids",
        "fewer files",
    ),
    (
        "TC362",
        {**mixed({"until": 0.5, "sequence_length": 512}, {}), "data__packing": Packing.best_fit},
        gpus(),
        "data.stages[0]: sequence_length=512 with data.packing=best_fit, whose bins are of",
        "data.packing=stream",
    ),
    (
        "TC362",
        {**mixed(code={"shuffle_shards": 2}), "data__packing": Packing.best_fit},
        gpus(),
        "data.sources.code.shuffle_shards=2 with data.packing=best_fit",
        "data.packing=stream",
    ),
    (
        "TC366",
        {"data__kind": "chat", "data__paths": ["a.jsonl"], "data__separator": "x"},
        gpus(),
        "data.packing=stream with data.kind=chat cuts conversations anywhere",
        "data.packing=best_fit",
    ),
    (
        "TC369",
        {
            "data__kind": "chat",
            "data__paths": ["a.jsonl"],
            "data__template_arguments": {"enable_thinking": False, "tools": []},
        },
        gpus(),
        "data.template_arguments names tools, which the template is given anyway",
        "leave it out",
    ),
    (
        "TC555",
        {"data__kind": "chat", "data__paths": ["a.jsonl"], "data__columns": {"mesages": "dialog"}},
        gpus(),
        "data.columns has 'mesages', and no record is read by that name",
        "data.columns={messages: dialog}",
    ),
    (
        "TC363",
        mixed(code={"fim_rate": 0.5}),
        gpus(),
        "data.sources.code.fim_rate=0.5 needs tokens that announce prefix, middle and suffix",
        "data.sources.code.fim_rate=0",
    ),
    (
        "TC363",
        {"data__fim_rate": 0.5, "data__fim_tokens": ["<a>", "<a>", "<b>"]},
        gpus(),
        "are not three tokens",
        "in this order",
    ),
    ("TC342", mixed({"until": 0.5}), gpus(), "stages[0]: until=0.5, and it is the last", "leave"),
    ("TC342", mixed({}, {}), gpus(), "data.stages[0] has no end, and is not the last", "one of"),
    (
        "TC342",
        mixed({"until": 0.5, "until_step": 9}, {}),
        gpus(),
        "has until and until_step, and is not the last",
        "one of",
    ),
    ("TC342", mixed({"until": 1.5}, {}), gpus(), "until=1.5 is no point within", "above 0"),
    (
        "TC342",
        mixed({"until_step": 50}, {"until": 0.5}, {}),
        gpus(),
        "data.stages[1]: until=0.5 is step 50, and the stage before it ends with step 50",
        "a step at least",
    ),
    (
        "TC342",
        mixed({"until_tokens": 10**12}, {}),
        gpus(),
        "and the run ends with step 100: nothing is left",
        "an earlier end",
    ),
    (
        "TC343",
        mixed({"until": 0.5}, {"weights": {"cod": 1.0}}),
        gpus(),
        "data.stages[1]: there is no source cod",
        "data.sources has code, prose",
    ),
    (
        "TC343",
        mixed({"until": 0.5}, {"weights": {"code": 0.0, "prose": 1.0}}),
        gpus(),
        "data.stages[1]: the weight of code is 0",
        "leave it out",
    ),
    (
        "TC343",
        mixed({"weights": {"code": 0.5, "prose": 0.4}}),
        gpus(),
        "data.stages[0]: the weights code 0.5, prose 0.4 have the sum 0.9",
        "whole numbers",
    ),
    ("TC343", mixed({"weights": {}}), gpus(), "its weights name no source", "code, prose"),
    (
        "TC343",
        {"data__stages": [{"weights": {"code": 1.0}}]},
        gpus(),
        "and there is only data.kind=stdlib",
        "data.sources",
    ),
    (
        "TC353",
        {"data__dedup": "minhash", "data__dedup_threshold": 0.1},
        gpus(),
        "data.dedup_threshold=0.1 is no likeness",
        "nearest legal: 0.3",
    ),
    (
        "TC500",
        {"data__executor": "ray", "data__executor_address": "http://head:1/x"},
        gpus(),
        "data.executor_address=http://head:1/x is no address",
        "nearest legal: auto, head:6379 or ray://head:10001",
    ),
    (
        "TC500",
        {"data__executor": "ray", "data__executor_address": "head:65536"},
        gpus(),
        "data.executor_address=head:65536 is no address",
        "nearest legal: auto, head:6379 or ray://head:10001",
    ),
    (
        "TC501",
        {"data__executor": "slurm", "data__executor_options": ["-p cpu"]},
        gpus(),
        "'-p cpu' in data.executor_options is no option",
        "--partition=cpu",
    ),
    (
        "TC501",
        {"data__executor": "slurm", "data__executor_options": ["--clusters=b"]},
        gpus(),
        "'--clusters=b' in data.executor_options is set by trainctl",
        "leave it out",
    ),
    (
        "TC501",
        {"data__executor": "slurm", "data__executor_options": ["--arr=0-9"]},
        gpus(),
        "'--arr=0-9' in data.executor_options is set by trainctl",
        "--workers N",
    ),
    (
        "TC501",
        {"data__executor": "slurm", "data__executor_options": ["--job-name=mine"]},
        gpus(),
        "'--job-name=mine' in data.executor_options is set by trainctl",
        "leave it out",
    ),
    (
        "TC502",
        {"data__executor": "ray", "data__factory": "mine:texts"},
        gpus(),
        "data.factory gives its texts in one process",
        "data.executor=local",
    ),
    (
        "TC502",
        {"data__executor": "slurm", "data__max_bytes": 9},
        gpus(),
        "text that data.max_bytes cuts",
        "leave data.max_bytes out",
    ),
    (
        "TC502",
        {"data__executor": "ray", "data__kind": "tokens", "data__paths": ["a.bin"]},
        gpus(),
        "the tokens are there",
        "data.executor=local",
    ),
    (
        "TC354",
        {**mixed(), "data__dedup": "exact", "data__dedup_precedence": ["bocks"]},
        gpus(),
        "there is no source bocks",
        "data.sources has code, prose",
    ),
    (
        "TC355",
        {"data__decontaminate": ["held_out"], "data__held_out_fraction": 0.0},
        gpus(),
        "nothing is held out",
        "data.held_out_paths",
    ),
    (
        "TC356",
        {"data__filters": {"words": {}}},
        gpus(),
        "data.filters.words needs file",
        "data.filters.words.file=",
    ),
    (
        "TC356",
        {"data__filters": {"function": {"minimum": 1.0}}},
        gpus(),
        "data.filters.function needs call",
        "data.filters.function.call=",
    ),
    ("TC356", {"data__filters": {"urls": {"file": "a"}}}, gpus(), "addresses", "leave it out"),
    (
        "TC356",
        mixed(prose={"filters": {"gopher_quality": {"min_words": 70, "max_words": 60}}}),
        gpus(),
        "data.sources.prose.filters.gopher_quality.min_words=70 is above max_words=60",
        "at most 60",
    ),
    (
        "TC357",
        {"data__max_bytes": 100, "data__dedup": "exact"},
        gpus(),
        "data.max_bytes=100 cuts a document, and data.dedup looks at whole ones",
        "leave data.max_bytes out",
    ),
    (
        "TC357",
        {"data__decontaminate": ["bench.npy"]},
        gpus(),
        "data.decontaminate looks for texts, and bench.npy has ids",
        "name the texts",
    ),
    (
        "TC357",
        {"data__kind": "stream", "data__url": "s3://a", "data__dedup": "exact"},
        gpus(),
        "data.dedup looks at texts, and data.kind=stream has none",
        "name the texts that the ids were made of",
    ),
    (
        "TC357",
        {"data__factory": "mine:texts", "data__filters": {"c4": {}}},
        gpus(),
        "data.filters looks at files, and data.factory=mine:texts gives the texts",
        "leave documents out",
    ),
    (
        "TC344",
        mixed({"until": 0.5, "sequence_length": 1000}, {}),
        gpus(),
        "data.stages[0]: sequence_length=1000: a batch of ",
        "nearest legal: 512 or 1024",
    ),
    (
        "TC344",
        {**mixed({"until": 0.5}, {"sequence_length": 512}), "training__sequence_length": 256},
        gpus(),
        "sequence_length=512 is more than a rank has room for at once",
        "training.sequence_length=512, and the shorter length in the other stages",
    ),
    (
        "TC344",
        mixed({"until": 0.5}, {"sequence_length": 10**7}),
        gpus(),
        "sequence_length=10000000 is not from 2 to model.max_position_embeddings",
        "",
    ),
    (
        "TC344",
        {
            **mixed({"until": 0.5, "sequence_length": 31}, {}),
            "parallelism__sequence": 2,
        },
        gpus(),
        "sequence_length=31 is not divided by parallelism.sequence=2",
        "",
    ),
    (
        "TC349",
        {**mixed({"until": 0.5, "sequence_length": 512}, {}), **DEEPCOMPILE},
        gpus(),
        "data.stages[0]: sequence_length=512 with kernels.compile=deepcompile",
        "kernels.compile=none",
    ),
    (
        "TC349",
        {
            **mixed({"until": 0.5, "sequence_length": 8}, {}),
            "precision__compute": "fp8",
            "training__sequence_length": 16,
            "training__micro_batch_size": 1,
            "training__global_batch_size": 2,
            "parallelism__sequence": 2,
        },
        gpus(2),
        "data.stages[0]: sequence_length=8: 8 tokens in a forward pass with precision.compute=fp8",
        "16",
    ),
    (
        "TC349",
        {
            **mixed({"until": 0.5, "sequence_length": 1026}, {}),
            "training__sequence_length": 2052,
            "parallelism__tensor": 4,
            "parallelism__sequence_sharded_norms": True,
        },
        gpus(8),
        "sequence_length=1026 is not a multiple of 4, over which",
        "1028",
    ),
    (
        "TC344",
        {**mixed(prose={"shuffle_shards": 4}), "training__sequence_length": 1000},
        gpus(),
        "sequence_length=1000 does not divide a shard",
        "nearest legal: 512 or 1024",
    ),
    (
        "TC027",
        {
            "training__deterministic": True,
            "launcher__environment": {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
        },
        gpus(8),
        "environment sets CUBLAS_WORKSPACE_CONFIG, which training.deterministic=true",
        "leave CUBLAS_WORKSPACE_CONFIG out",
    ),
    (
        "TC027",
        {"training__deterministic": True, **DEEPCOMPILE},
        gpus(8),
        "times and memory that it measures",
        "kernels.compile=blocks",
    ),
    (
        "TC028",
        {"training__ema_decay": 0.99, **NVME, "offload__nvme_path": "/n"},
        gpus(8),
        "ema_decay=0.99 with offload.optimizer=nvme: DeepSpeed's swapper",
        "leave offload.optimizer out",
    ),
    (
        "TC028",
        {"training__ema_decay": 0.99, "precision__master_weights": "bf16"},
        gpus(8),
        "the average is in fp32",
        "leave precision.master_weights out",
    ),
    *(
        ("TC028", {"training__ema_decay": 0.99, **changes}, gpus(8), why, "leave")
        for changes, why in (
            (ZENFLOW, "the master weights lag"),
            ({**OFFLOAD, "offload__super_offload": True}, "another process has"),
            (DEEPCOMPILE, "keeps gathered weights"),
        )
    ),
    (
        "TC075",
        {"checkpoint__best_of": "ema_loss"},
        gpus(8),
        "of the average of the weights, and none is kept",
        "training.ema_decay",
    ),
    ("TC001", {"parallelism__tensor": 4}, gpus(6), "4 does not divide the 6", "use 4 or 8"),
    ("TC001", {"parallelism__data": 3}, gpus(8), "has 8 devices", "parallelism.data=8"),
    ("TC003", {"parallelism__tensor": 8}, gpus(8), "num_attention_heads=4", "tensor=4"),
    (
        "TC003",
        {
            "model__num_attention_heads": 12,
            "model__num_key_value_heads": 6,
            "model__head_dim": 32,
            "parallelism__tensor": 4,
        },
        gpus(8),
        "num_key_value_heads=6",
        "parallelism.tensor=3 or 6",
    ),
    (
        "TC003",
        {"model__num_key_value_heads": 2, "parallelism__tensor": 4, "script": "train.py"},
        gpus(8),
        "num_key_value_heads=2",
        "parallelism.tensor=2",
    ),
    (
        "TC530",
        {**SHARDED, "zero_stage__shard_group_size": 3},
        gpus(8),
        "shard_group_size=3 does not divide the 8 data-parallel ranks",
        "zero_stage.shard_group_size=2 or 4",
    ),
    (
        "TC590",
        {
            "zero_stage__stage": 3,
            "zero_stage__gather": "blocks",
            "kernels__compile": "deepcompile",
        },
        gpus(8),
        "zero_stage.gather=blocks with kernels.compile=deepcompile: the compiled graph gathers",
        "zero_stage.gather=null",
    ),
    (
        "TC532",
        {"model__num_key_value_heads": 2, "parallelism__tensor": 4, "optimizer__kind": "muon"},
        gpus(8),
        "parallelism.tensor=4 and 2 key-value heads",
        "parallelism.tensor=2",
    ),
    (
        "TC405",
        {"zero_stage__shard_group_size": 4},
        gpus(8),
        "engine.kind=deepspeed partitions over all data-parallel ranks",
        "engine=fsdp2",
    ),
    ("TC004", {"parallelism__sequence": 8}, gpus(8), "num_attention_heads=4", "sequence=4"),
    (
        "TC004",
        {
            "model__num_attention_heads": 12,
            "model__num_key_value_heads": 4,
            "model__head_dim": 32,
            "parallelism__sequence": 6,
        },
        gpus(6),
        "neither divides the other",
        "sequence=4",
    ),
    (
        "TC005",
        {"parallelism__sequence": 4, "training__sequence_length": 2046},
        gpus(8),
        "not a multiple of parallelism.sequence=4",
        "sequence_length=2044 or 2048",
    ),
    ("TC006", {"parallelism__pipeline": 8}, gpus(8), "8 stages", "parallelism.pipeline=4"),
    (
        "TC006",
        {**DUALPIPEV, "parallelism__pipeline": 4},
        gpus(4),
        "parallelism.pipeline=4 ranks of two stages",
        "parallelism.pipeline=2 at most",
    ),
    (
        "TC533",
        {**DUALPIPEV, "training__gradient_accumulation_steps": 3},
        gpus(2),
        "needs 4 micro-batches in a step, and there are 3",
        "training.gradient_accumulation_steps=4 or more",
    ),
    (
        "TC533",
        {**DUALPIPEV, "script": "program.py"},
        gpus(2),
        "trainctl's own trainer",
        "parallelism.pipeline_schedule=1f1b",
    ),
    (
        "TC008",
        {"parallelism__pipeline": 2, "parallelism__sequence": 2},
        gpus(8),
        "no sequence axis",
        "parallelism.sequence=1",
    ),
    ("TC009", {"parallelism__expert": 2}, gpus(8), "no experts", "parallelism.expert=1"),
    (
        "TC009",
        {"parallelism__expert": 2, "model__family": "hf", "model__path": "m"},
        gpus(8),
        "the model of m has no experts",
        "parallelism.expert=1",
    ),
    (
        "TC009",
        {**EXPERTS, "parallelism__expert": 3, "model__num_experts": 12},
        gpus(8),
        "data-parallel size 8",
        "expert=2 or 4",
    ),
    (
        "TC009",
        {**EXPERTS, "parallelism__expert": 8, "model__num_experts": 12},
        gpus(8),
        "the model's 12 experts",
        "expert=4",
    ),
    (
        "TC009",
        {**EXPERTS, "parallelism__expert": 4, "parallelism__tensor": 4},
        gpus(16),
        "the model's 8 experts over 4 tensor ranks each",
        "parallelism.expert=2",
    ),
    (
        "TC009",
        {
            **EXPERTS,
            "parallelism__expert": 4,
            "parallelism__tensor": 4,
            "model__num_experts": 10,
        },
        gpus(16),
        "the model's 10 experts over 4 tensor ranks each",
        "parallelism.expert=1",
    ),
    *(
        (
            rule,
            {
                **EXPERTS,
                **LORA,
                "adapter__targets": ["experts.down_proj"],
                "model__anatomy": [
                    *SMALL[:-1],
                    "model.layers.{0-1}.mlp.experts.down_proj 8x64x32 expert",
                    "model.layers.{0-1} block 0 experts=8/2",
                ],
                **changes,
            },
            gpus(8),
            text,
            hint,
        )
        for rule, changes, text, hint in (
            ("TC540", {"adapter__kind": "dora"}, "dora with an adapter of model", "adapter=lora"),
            ("TC540", {"adapter__dropout": 0.1}, "dropout=0.1 with an adapter", "dropout=0"),
            ("TC540", {**NF4, "adapter__targets": []}, "nf4 with a mixture", "weights=compute"),
            ("TC541", {"adapter__rank": 4}, "in bf16: grouped products take", "adapter.rank=8"),
        )
    ),
    *(
        ("TC390", {**EXPERTS, **changes}, gpus(8), f"{text} with parallelism.expert=2", hint)
        for changes, text, hint in (
            ({"parallelism__sequence": 2}, "parallelism.sequence=2", "parallelism.sequence=1"),
            ({"optimizer__kind": "muon"}, "optimizer.kind=muon", "optimizer=adamw"),
            ({"precision__compute": "fp16"}, "precision.compute=fp16", "precision=bf16"),
            ({"precision__autocast": True}, "precision.autocast=true", "precision=bf16"),
            (NVME, "offload.optimizer=nvme", "offload.optimizer=cpu"),
            (ZENFLOW, "offload.zenflow=true", "offload.zenflow=false"),
            (
                {"zero_stage__stage": 3, "zero_stage__hpz_partition_size": 8},
                "zero_stage.hpz_partition_size=8",
                "zero_stage.hpz_partition_size=1",
            ),
            (
                {"zero_stage__stage": 3, "zero_stage__quantized_weights": True},
                "zero_stage.quantized_weights=true",
                "zero_stage.quantized_weights=false",
            ),
            (
                {"zero_stage__stage": 2, "zero_stage__reduce_scatter": False},
                "zero_stage.reduce_scatter=false",
                "zero_stage.reduce_scatter=true",
            ),
            ({"kernels__compile": "blocks"}, "kernels.compile=blocks", "kernels.compile=none"),
            (
                {"gradients__centralize": True},
                "gradients.centralize=true",
                "gradients.centralize=false",
            ),
        )
    ),
    *(
        ("TC392", {"objective__kind": "dpo", **changes}, gpus(), message, "objective=next_token")
        for changes, message in (
            (
                {"parallelism__sequence": 2},
                "sequence=2 with objective.kind=dpo: a rank sees",
            ),
            ({"parallelism__pipeline": 2}, "the loss of a last stage is that of the next token"),
            ({"kernels__cross_entropy": "chunked"}, "kernels.cross_entropy=chunked with obj"),
            (DEEPCOMPILE, "kernels.compile=deepcompile with objective.kind=dpo"),
            ({"stability__z_loss": 0.1}, "it is a part of the next token's loss"),
            (
                {**EXPERTS, "parallelism__expert": 1, "experts__auxiliary_loss": 0.1},
                "it is weighted by tokens",
            ),
        )
    ),
    *(
        ("TC495", {"objective__kind": "grpo", **changes}, gpus(), message, hint)
        for changes, message, hint in (
            (
                {"training__global_batch_size": 16, "objective__samples": 6},
                "counts answers",
                "training.global_batch_size=18",
            ),
            (
                {"training__sequence_length": 1024},
                "are more than training.sequence_length=1024",
                "=1536",
            ),
            ({"objective__kl_weight": 0.1}, "keeps only below an adapter", "adapter=lora"),
            (
                {
                    "objective__kl_weight": 0.1,
                    "adapter__kind": "lora",
                    "adapter__also_train": ["head", "embeddings"],
                },
                "adapter.also_train=[head, embeddings] trains some of them",
                "adapter.also_train=[]",
            ),
            (
                {"training__batch_ramp": [{"until_steps": 2, "global_batch_size": 8}]},
                "training.batch_ramp with objective=grpo is not supported",
                "training.batch_ramp=[]",
            ),
        )
    ),
    *(
        (
            "TC491",
            {"objective__kind": "grpo", **changes},
            gpus(),
            message,
            "objective.rollout=vllm",
        )
        for changes, message in (
            (
                {"parallelism__tensor": 2, "parallelism__sequence_sharded_norms": True},
                "a single token cannot be cut",
            ),
            ({**EXPERTS, "parallelism__expert": 2}, "another number of tokens"),
            ({"zero_stage__stage": 3, "offload__parameters": "nvme"}, "NVMe for each token"),
        )
    ),
    *(
        (
            "TC492",
            {"objective__kind": "grpo", "objective__rollout": "vllm", **changes},
            gpus(),
            message,
            hint,
        )
        for changes, message, hint in (
            ({}, "rollout_url=null: no server is named", "http://localhost:8000"),
            ({"objective__rollout_url": "localhost:1"}, "url=localhost:1: no", "http://"),
            (
                {"objective__rollout_url": "http://h:1", "objective__top_p": 0.9},
                "objective.top_p=0.9 with objective.rollout=vllm",
                "objective.top_p=1",
            ),
        )
    ),
    (
        "TC470",
        {"objective__kind": "distill", "objective__top_k": 10**9},
        gpus(),
        "objective.top_k=1,000,000,000 is more than model.vocab_size",
        "stores whole distributions",
    ),
    (
        "TC472",
        {"model__future_blocks": 1, "parallelism__tensor": 2},
        gpus(),
        "parallelism.tensor=2 with objective.kind=",
        "objective=next_token",
    ),
    *(
        (
            "TC473",
            {"objective__kind": "classify", "objective__class_weights": weights},
            gpus(),
            message,
            hint,
        )
        for weights, message, hint in (
            ([1.0], "has 1 numbers, and objective.outputs=2", "a weight for each of 2 classes"),
            ([1.0] * 3, "has 3 numbers, and objective.outputs=2", "objective.outputs=3, or"),
            ([1.0, -0.5], "has -0.5, and a weight is 0 or more", "0 leaves"),
        )
    ),
    (
        "TC516",
        {"objective__kind": "masked", "objective__random_share": 0.3},
        gpus(),
        "objective.mask_share=0.8 and objective.random_share=0.3 are more than all",
        "objective.random_share=0.2",
    ),
    ("TC490", {"objective__kind": "grpo"}, gpus(), "objective.rewards has none", "exact_answer"),
    *(
        (
            "TC490",
            {"objective__kind": "grpo", "objective__rewards": {"mine": {"kind": kind, **keys}}},
            gpus(),
            message,
            hint,
        )
        for kind, keys, message, hint in (
            ("function", {}, "objective.rewards.mine names no function", "module:function"),
            (
                "regex",
                {},
                "objective.rewards.mine: a reward of kind regex needs a pattern",
                "REGEX",
            ),
            ("regex", {"pattern": "("}, "is no regular expression", "re"),
            ("length", {}, "needs most_tokens", "most_tokens=N"),
            ("json_schema", {"file": "no.json"}, "no.json is no JSON Schema", "correct"),
        )
    ),
    (
        "TC393",
        {"objective__kind": "simpo"},
        gpus(),
        "data.kind=stdlib gives texts, and objective.kind=simpo takes pairs of answers",
        "data.kind=preferences",
    ),
    (
        "TC393",
        {**PAIRS, "objective__kind": "next_token"},
        gpus(),
        "data.kind=preferences gives pairs of answers, and objective.kind=next_token takes texts",
        "objective=dpo",
    ),
    (
        "TC393",
        {**PAIRS, "data__on_too_long": "cut"},
        gpus(),
        "the end of a record would be missing",
        "data.on_too_long=drop",
    ),
    (
        "TC393",
        {**PAIRS, "data__mask_documents": False},
        gpus(),
        "a document of a record would see the one before it",
        "data.mask_documents=true",
    ),
    ("TC393", {**mixed(), "objective__kind": "dpo"}, gpus(), "those of one source", "paths"),
    (
        "TC393",
        mixed(prose={"kind": "preferences"}),
        gpus(),
        "data.sources.prose.kind=preferences gives pairs of answers",
        "data.sources.prose.kind=chat",
    ),
    (
        "TC393",
        {**PAIRS, "data__factory": "texts:of"},
        gpus(),
        "data.factory=texts:of with objective.kind=",
        "data.factory=null",
    ),
    (
        "TC412",
        {"callbacks": {"layer_statistics": {}}, "parallelism__pipeline": 2},
        gpus(),
        "parallelism.pipeline=2: the callback layer_statistics reads activations",
        "parallelism.pipeline=1, or leave layer_statistics out",
    ),
    (
        "TC412",
        {
            "callbacks": {"gradient_noise_scale": {}},
            "training__micro_batch_size": 8,
            "training__global_batch_size": 8,
        },
        gpus(1),
        "a step is 1 micro-batch, and the callback gradient_noise_scale compares 2",
        "a smaller training.micro_batch_size",
    ),
    *(
        (
            "TC391",
            {
                **EXPERTS,
                "parallelism__expert": 1,
                f"experts__{name}": 0.1,
                f"parallelism__{axis}": 2,
            },
            gpus(8),
            f"experts.{name}=0.1 with parallelism.{axis}=2",
            f"experts.{name}=0, or parallelism.{axis}=1",
        )
        for name, axis in (("auxiliary_loss", "sequence"), ("z_loss", "pipeline"))
    ),
    (
        "TC391",
        {
            **EXPERTS,
            "parallelism__expert": 1,
            "experts__z_loss": 0.1,
            "parallelism__tensor": 2,
            "parallelism__sequence_sharded_norms": True,
        },
        gpus(8),
        "experts.z_loss=0.1 with parallelism.sequence_sharded_norms=true",
        "parallelism.sequence_sharded_norms=false",
    ),
    (
        "TC031",
        {**EXPERTS, "zero_stage__stage": 0},
        gpus(8),
        "would clip by a gradient norm without experts",
        "zero_stage=1",
    ),
    ("TC010", {"model__attention": "flash_attention_2"}, cpus(), "needs a GPU", "sdpa"),
    (
        "TC004",
        {"parallelism__sequence": 2, "parallelism__tensor": 4},
        gpus(8),
        "num_attention_heads / parallelism.tensor=4 = 1",
        "sequence=1",
    ),
    (
        "TC005",
        {
            "parallelism__tensor": 4,
            "parallelism__sequence_sharded_norms": True,
            "training__sequence_length": 2046,
        },
        gpus(8),
        "parallelism.tensor=4 (parallelism.sequence_sharded_norms)",
        "sequence_length=2044 or 2048",
    ),
    (
        "TC011",
        {"parallelism__tensor": 4, "model__vocab_size": 5},
        gpus(8),
        "leaves a rank without a token of model.vocab_size=5",
        "parallelism.tensor=3",
    ),
    (
        "TC012",
        {"parallelism__sequence": 2, "model__attention": "eager"},
        gpus(8),
        "mask of the whole sequence",
        "model.attention=sdpa",
    ),
    (
        "TC012",
        {
            "parallelism__context": 2,
            "model__family": "mistral",
            "model__sliding_window": 16,
            "training__sequence_length": 32,
        },
        gpus(8),
        "model.sliding_window=16: sequences of 32 would be attended to as a whole",
        "or on a GPU parallelism.sequence, model.attention=flash_attention_2",
    ),
    (
        "TC001",
        {"parallelism__context": 3},
        gpus(8),
        "sequence 1 x context 3 = 3 does not divide the 8 devices",
        "use 6 or 9 devices",
    ),
    (
        "TC005",
        {"parallelism__context": 4, "training__sequence_length": 36},
        gpus(8),
        "not a multiple of parallelism.sequence=1 x parallelism.context=4, of two chunks each",
        "sequence_length=32 or 40",
    ),
    (
        "TC008",
        {"parallelism__context": 2, "parallelism__pipeline": 2},
        gpus(8),
        "parallelism.context=2 with parallelism.pipeline=2: DeepSpeed's pipeline has no context",
        "parallelism.context=1 or parallelism.pipeline=1",
    ),
    (
        "TC520",
        {"parallelism__context": 2, "precision__compute": DataType.fp32},
        gpus(8),
        "parallelism.context=2 in fp32",
        "precision=bf16",
    ),
    (
        "TC520",
        {
            "parallelism__sequence": 2,
            "data__mask_documents": True,
            "precision__compute": DataType.fp32,
        },
        gpus(8),
        "parallelism.sequence=2 and data.mask_documents=true in fp32",
        "precision=bf16",
    ),
    (
        "TC520",
        {"parallelism__sequence": 2, "data__mask_documents": True, "model__head_dim": 12},
        gpus(8),
        "heads of 12 numbers",
        "data.mask_documents=false",
    ),
    (
        "TC520",
        {
            **READ,
            "parallelism__context": 2,
            "model__anatomy": [*SMALL[:-1], "model.layers.{0-1} block 0 attention=4x264x16"],
        },
        gpus(8),
        "heads of 264 numbers",
        "parallelism.context=1",
    ),
    *(
        (
            "TC522",
            {**READ, **axes, "model__anatomy": ["model drops-attention", *SMALL]},
            gpus(8),
            f"{key}={text}: the model's code drops a part of its attention",
            hint,
        )
        for key, axes, text, hint in (
            ("parallelism.context", {"parallelism__context": 2}, "2", "parallelism.context=1"),
            (
                "parallelism.sequence",
                {"parallelism__sequence": 2, "data__mask_documents": True},
                "2 and data.mask_documents=true",
                "data.mask_documents=false",
            ),
        )
    ),
    (
        "TC520",
        {"parallelism__context": 2, "model__head_dim": 12},
        gpus(8),
        "heads of 12 numbers: the fused kernel takes multiples of 8 up to 256",
        "parallelism.context=1 and parallelism.sequence",
    ),
    (
        "TC521",
        {"parallelism__context": 2, "script": "train.py"},
        gpus(8),
        "for a program of your own: DeepSpeed's JSON has no context axis",
        "parallelism.sequence",
    ),
    (
        "TC012",
        {
            "parallelism__sequence": 2,
            "model__family": "mistral",
            "model__sliding_window": 1024,
            "training__sequence_length": 2048,
        },
        gpus(8),
        "attended to as a whole",
        "sequence_length=1024",
    ),
    (
        "TC013",
        {"parallelism__pipeline": 2, "parallelism__stage_blocks": [1, 1, 2]},
        gpus(8),
        "has 3 stages, parallelism.pipeline=2",
        "parallelism.pipeline=3",
    ),
    (
        "TC013",
        {**DUALPIPEV, "parallelism__stage_blocks": [2, 2]},
        gpus(2),
        "has 2 stages, parallelism.pipeline=2 with two on each rank",
        "parallelism.pipeline=1",
    ),
    (
        "TC013",
        {"parallelism__pipeline": 2, "parallelism__stage_blocks": [4, 0]},
        gpus(8),
        "in stages of at least 0",
        "the stages are balanced",
    ),
    (
        "TC012",
        {
            **READ,
            "parallelism__sequence": 2,
            "model__model_type": "phi3",
            "model__anatomy": ["model turns-by-length", *SMALL],
        },
        gpus(8),
        "the rotary embeddings of phi3 depend on the largest position",
        "parallelism.sequence=1",
    ),
    (
        "TC014",
        {
            **READ,
            "parallelism__sequence": 2,
            "model__model_type": "phi3",
            "model__trust_remote_code": True,
        },
        gpus(8),
        "code of the directory's own (model.trust_remote_code) was not tried",
        "parallelism.sequence=1",
    ),
    (
        "TC014",
        {
            "parallelism__tensor": 2,
            "model__family": "hf",
            "model__path": "m",
            "model__model_type": "bloom",
        },
        gpus(8),
        "parallelism.tensor=2 with the bloom architecture",
        "parallelism.tensor=1",
    ),
    (
        "TC014",
        {**MODULE, "parallelism__tensor": 2},
        gpus(8),
        "=2 with the model of model.factory=mine:model: Mine has no tensor_plan()",
        "parallelism.tensor=1",
    ),
    ("TC402", {"model__family": "module"}, gpus(1), "needs model.factory", "model.factory=package"),
    (
        "TC403",
        {**MODULE, "data__mask_documents": True},
        gpus(1),
        "the module of model.factory=mine:model does not say that its forward pass keeps documents",
        "data.mask_documents=false",
    ),
    (
        "TC153",
        {**READ, "model__anatomy": ["model supports eager flash_attention_2", *SMALL[1:]]},
        gpus(1),
        "model.attention=sdpa: transformers has none for theirs",
        "model.attention=eager or flash_attention_2 (on GPUs)",
    ),
    (
        "TC370",
        {
            **READ,
            "data__mask_documents": True,
            "model__anatomy": ["model joins-documents sdpa", "model recurrent", *SMALL],
        },
        gpus(1),
        "theirs carries a state from token to token",
        "data.mask_documents=false",
    ),
    (
        "TC370",
        {
            **READ,
            "data__mask_documents": True,
            "model__anatomy": [
                "model supports sdpa eager flash_attention_2",
                "model joins-documents sdpa flash_attention_2",
                *SMALL[1:],
            ],
        },
        gpus(1),
        "=true with model.attention=sdpa: no small model of theirs kept the documents of a sample "
        "apart",
        "model.attention=eager or data.mask_documents=false",
    ),
    (
        "TC370",
        {
            **READ,
            **PAIRS,
            "model__anatomy": [
                "model supports sdpa",
                "model joins-documents sdpa",
                *SMALL[1:],
            ],
        },
        gpus(1),
        "no small model of theirs kept the documents of a sample apart",
        "another model: objective=dpo needs it",
    ),
    (
        "TC009",
        {**EXPERTS, "model__anatomy": ["model experts-apart", *SMALL]},
        gpus(8),
        "expert=2: the experts of",
        "parallelism.expert=1",
    ),
    *(
        (
            "TC400",
            {
                **EXPERTS,
                "parallelism__expert": 1,
                f"experts__{name}": 0.1,
                "model__anatomy": ["model routers-apart", *SMALL],
            },
            gpus(8),
            f"experts.{name}=0.1: the routers of",
            f"experts.{name}=0",
        )
        for name in ("auxiliary_loss", "z_loss", "bias_update_rate")
    ),
    (
        "TC400",
        {
            **EXPERTS,
            "parallelism__expert": 1,
            "experts__bias_update_rate": 0.1,
            "model__anatomy": [
                *SMALL[:-1],
                "model.layers.{0-1}.mlp.gate.weight 8x64 router",
                "model.layers.{0-1} block 0 experts=8/2",
            ],
        },
        gpus(8),
        "have no bias that experts are chosen by",
        "experts.auxiliary_loss=0.001",
    ),
    (
        "TC401",
        {**READ, "model__anatomy": [*SMALL, "model.layers.0.mixer.A_log drawn-whole"]},
        gpus(1),
        "the code of theirs starts model.layers.0.mixer.A_log",
        "model.initial_weights=DIR",
    ),
    (
        "TC144",
        {"model__weights": "random", "model__initial_weights": "w"},
        gpus(1),
        "model.initial_weights=w names others",
        "leave one of them out",
    ),
    ("TC015", {"model__mup": True}, gpus(1), "without the width", "model.mup_base_width=256"),
    (
        "TC015",
        {**MUP, "model__mup_base_width": 48},
        gpus(1),
        "1.5 heads, 1.5 of them",
        "model.mup_base_width=32",
    ),
    (
        "TC015",
        {**MUP, "model__num_key_value_heads": 1},
        gpus(1),
        "2 heads, 0.5 of them for keys and values",
        "model.mup_base_width=128",
    ),
    (
        "TC015",
        {**MUP, "model__mup_base_head_dim": 24},
        gpus(1),
        "2.66667 heads",
        "model.mup_base_width=72",
    ),
    (
        "TC016",
        {**MUP, "model__family": "hf", "model__path": "m", "model__model_type": "bloom"},
        gpus(1),
        "model.family=hf (bloom)",
        "gpt2, llama, mistral, qwen3",
    ),
    ("TC016", {**MUP, "model__factory": "a:b"}, gpus(1), "model.factory=a:b", "model.mup=false"),
    (
        "TC016",
        {**MUP, "model__initial_weights": "runs/a"},
        gpus(1),
        "has them already",
        "model.mup=false",
    ),
    ("TC017", {**MUP, "optimizer__kind": "lamb"}, gpus(1), "kind=lamb", "optimizer=adamw"),
    (
        "TC017",
        {**MUP, "optimizer__kind": "adafactor"},
        gpus(1),
        "kind=adafactor",
        "optimizer=adamw",
    ),
    (
        "TC017",
        {**MUP, "optimizer__kind": "adam"},
        gpus(1),
        "weight_decay=0.1",
        "optimizer.weight_decay=0",
    ),
    (
        "TC020",
        {"training__global_batch_size": 20},
        gpus(8),
        "not a multiple of micro 1 x data 8",
        "16 (accumulation 2) or 24 (accumulation 3)",
    ),
    (
        "TC020",
        {"training__global_batch_size": 20, "training__gradient_accumulation_steps": 2},
        gpus(8),
        "not a multiple of accumulation 2 x data 8",
        "16 (micro 1) or 32 (micro 2)",
    ),
    (
        "TC020",
        {"training__global_batch_size": 4, "training__micro_batch_size": 1},
        gpus(8),
        "train_batch_size=4",
        "nearest legal: 8 (accumulation 1)",
    ),
    ("TC021", {"training__sequence_length": 4096}, gpus(), "=2048", "sequence_length=2048"),
    ("TC022", {"training__steps": None}, gpus(), "neither", "training.steps="),
    ("TC025", {"schedule__kind": "cyclic"}, gpus(), "step_every", "step_every=33"),
    ("TC025", {"schedule__kind": "cosine_restarts"}, gpus(), "step_every", "step_every=33"),
    (
        "TC062",
        {"schedule__kind": "milestones", "schedule__milestone_fractions": []},
        gpus(),
        "none to drop at",
        "schedule.milestones=",
    ),
    (
        "TC062",
        {"schedule__kind": "milestones", "schedule__milestones": [80, 50, 50]},
        gpus(),
        "[80,50,50]: each is above 0, and larger than the one before",
        "schedule.milestones=[50,80]",
    ),
    (
        "TC062",
        {"schedule__kind": "milestones", "schedule__milestone_fractions": [0.5, 1.5]},
        gpus(),
        "between 0 and 1",
        "schedule.milestone_fractions=[0.5]",
    ),
    (
        "TC067",
        {
            "training__steps": None,
            "training__epochs": 2.0,
            "data__factory": "own:text",
        },
        gpus(),
        "only your own code knows",
        "training.epoch_tokens=NUMBER",
    ),
    (
        "TC067",
        {"training__steps": None, "training__epochs": 2.0, "training__epoch_tokens": 2048},
        gpus(),
        "less than one sample of training.sequence_length=2048",
        "more text",
    ),
    (
        "TC063",
        {"schedule__kind": "plateau"},
        gpus(),
        "measured only at the end",
        "training.evaluate_every_steps=5",
    ),
    (
        "TC063",
        {
            "schedule__kind": "plateau",
            "training__evaluate_every_steps": 5,
            "training__evaluation_samples": 0,
        },
        gpus(),
        "nothing is evaluated",
        "training.evaluation_samples=64",
    ),
    (
        "TC063",
        {"schedule__kind": "plateau", "script": "own.py"},
        gpus(),
        "a program of your own trains here",
        "another schedule",
    ),
    (
        "TC064",
        {"optimizer__lr_scaling": "linear", "training__global_batch_size": 16},
        gpus(),
        "needs optimizer.lr_scaling_batch_size",
        "optimizer.lr_scaling_batch_size=16 leaves",
    ),
    (
        "TC065",
        {
            "training__global_batch_size": 16,
            "training__batch_ramp": [{"until_steps": 5, "global_batch_size": 12}],
        },
        gpus(),
        "global_batch_size=12 is not a multiple of micro 1 x data 8 = 8",
        "nearest legal: 8 or 16",
    ),
    (
        "TC025",
        {"schedule__kind": "exponential", "schedule__floor_ratio": 0.0},
        gpus(),
        "never reaches 0",
        "floor_ratio=0.01",
    ),
    (
        "TC026",
        {
            "training__global_batch_tokens": 32_768,
            "training__micro_batch_size": 1,
            "training__gradient_accumulation_steps": 3,
        },
        gpus(8),
        "accumulation 3 x data 8",
        "it is derived",
    ),
    (
        "TC030",
        {"parallelism__pipeline": 2, "zero_stage__stage": 2},
        gpus(),
        "ZeRO 0 and 1 only",
        "zero_stage=1",
    ),
    (
        "TC031",
        {"parallelism__pipeline": 2, "zero_stage__stage": 0},
        gpus(),
        "by each stage's own gradient norm",
        "zero_stage=1",
    ),
    (
        "TC031",
        {"parallelism__tensor": 2, "zero_stage__stage": 0},
        gpus(),
        "by the first tensor rank's gradient norm",
        "zero_stage=1",
    ),
    ("TC032", {"offload__parameters": "cpu"}, gpus(), "stage 3, and it is 1", "zero_stage=3"),
    (
        "TC032",
        {"offload__optimizer": "cpu", "zero_stage__stage": 0},
        gpus(),
        "stage 1 or more",
        "zero_stage=1",
    ),
    (
        "TC032",
        {"offload__optimizer": "nvme", "offload__nvme_path": "/n"},
        gpus(),
        "host memory instead",
        "offload.optimizer=cpu",
    ),
    (
        "TC032",
        {"offload__optimizer": "cpu", "offload__ratio": 0.5},
        gpus(),
        "offload.ratio=0.5",
        "offload.ratio=1",
    ),
    ("TC033", NVME, gpus(), "needs offload.nvme_path", "offload.nvme_path="),
    (
        "TC034",
        {**OFFLOAD, "optimizer__kind": "lamb", "script": "train.py"},
        gpus(),
        "no CPU kernel",
        "adamw",
    ),
    (
        "TC034",
        {**OFFLOAD, "optimizer__kind": "sgd", "offload__ratio": 0.5},
        gpus(),
        "not sgd",
        "offload.ratio=1",
    ),
    ("TC035", {"offload__zenflow": True}, gpus(), "it is none", "offload.optimizer=cpu"),
    ("TC035", {**ZENFLOW, "zero_stage__stage": 3}, gpus(), "transposed", "zero_stage=2"),
    ("TC035", {**ZENFLOW, "zero_stage__stage": 0}, gpus(), "needs ZeRO stage 1", "zero_stage=2"),
    (
        "TC035",
        {**ZENFLOW, "training__gradient_accumulation_steps": 2},
        gpus(),
        "of each micro-batch",
        "gradient_accumulation_steps=1",
    ),
    (
        "TC035",
        {**ZENFLOW, "optimizer__gradient_clipping": 1.0},
        gpus(),
        "unclipped",
        "optimizer.gradient_clipping=0",
    ),
    (
        "TC035",
        {**ZENFLOW, "offload__zenflow_overlap_step": True},
        gpus(),
        "to no checkpoint",
        "offload.zenflow_overlap_step=false",
    ),
    ("TC035", {**ZENFLOW, "optimizer__kind": "lion"}, gpus(), "not lion", "optimizer=adamw"),
    ("TC035", {**ZENFLOW, **DEEPCOMPILE}, gpus(), "compiles away", "kernels.compile=none"),
    (
        "TC035",
        {**ZENFLOW, "zero_stage__reduce_scatter": False},
        gpus(),
        "finds its columns",
        "zero_stage.reduce_scatter=true",
    ),
    (
        "TC035",
        {**ZENFLOW, "zero_stage__contiguous_gradients": False},
        gpus(),
        "finds its columns",
        "zero_stage.contiguous_gradients=true",
    ),
    *(
        ("TC035", {**ZENFLOW, f"parallelism__{axis}": 2}, gpus(), "ranks only", f"{axis}=1")
        for axis in ("tensor", "pipeline", "sequence")
    ),
    ("TC035", {**ZENFLOW, "precision__compute": "fp16"}, gpus(), "loss scale", "precision=bf16"),
    ("TC035", {**ZENFLOW, "precision__autocast": True}, gpus(), "two formats", "precision=bf16"),
    *(
        ("TC035", {**ZENFLOW, f"precision__{name}": "bf16"}, gpus(), "in fp32 only", "=fp32")
        for name in ("master_weights", "optimizer_states")
    ),
    (
        "TC035",
        {**ZENFLOW, "precision__communication": "fp32"},
        gpus(),
        "in the weights' format",
        "precision.communication=null",
    ),
    ("TC035", {"offload__super_offload": True}, gpus(), "none and 1", "zero_stage=3"),
    ("TC035", {**OFFLOAD, "offload__super_offload": True}, cpus(), "for CUDA", "=false"),
    (
        "TC035",
        {**OFFLOAD, "offload__super_offload": True, "zero_stage__stage": 3},
        gpus(),
        "a checkpoint would lack them",
        "checkpoint.at_end=false",
    ),
    *(
        ("TC035", {**OFFLOAD, "offload__super_offload": True, **changes}, gpus(), message, hint)
        for changes, message, hint in (
            ({"optimizer__kind": "adam"}, "updates by AdamW", "optimizer=adamw"),
            ({"optimizer__kind": "lion"}, "updates by AdamW", "super_offload=false"),
            ({"precision__master_weights": "bf16"}, "fp32 master weights", "=fp32"),
            (
                {"precision__compute": "fp16", "optimizer__gradient_clipping": 0.0},
                "multiplied by the loss scale",
                "precision=bf16",
            ),
        )
    ),
    (
        "TC034",
        {**OFFLOAD, "optimizer__kind": "adam", "offload__ratio": 0.5, "zero_stage__stage": 3},
        gpus(),
        "is for adamw, not adam",
        "offload.ratio=1",
    ),
    (
        "TC037",
        {
            "zero_stage__stage": 3,
            "zero_stage__hpz_partition_size": 2,
            "parallelism__tensor": 2,
        },
        gpus(8),
        "over tensor ranks that hold different ones",
        "parallelism.tensor=1",
    ),
    (
        "TC037",
        {
            "zero_stage__stage": 3,
            "zero_stage__hpz_partition_size": 2,
            "offload__parameters": "cpu",
        },
        gpus(8),
        "offload.parameters sends them away",
        "offload.parameters=none",
    ),
    (
        "TC036",
        {"zero_stage__allgather_bucket_size": 1001},
        gpus(),
        "1001 is odd",
        "allgather_bucket_size=1000 or 1002",
    ),
    (
        "TC037",
        {"zero_stage__stage": 3, "zero_stage__hpz_partition_size": 3},
        gpus(8),
        "8 devices",
        "hpz_partition_size=2 or 4",
    ),
    (
        "TC038",
        {"zero_stage__stage": 3, "zero_stage__quantized_weights": True},
        cpus(),
        "GPU kernels",
        "quantized_weights=false",
    ),
    (
        "TC039",
        {"zero_stage__stage": 3, "optimizer__kind": "muon", "script": "train.py"},
        gpus(),
        "zero_stage.reduce_scatter",
        "reduce_scatter=false",
    ),
    ("TC050", {}, gpus(supports_bf16=False), "compute=bf16", "precision=fp16"),
    ("TC050", {"precision__compute": "fp16"}, cpus(), "on the CPU", "precision=bf16"),
    ("TC050", {"precision__compute": "fp8"}, cpus(), "in fp8", "precision=bf16, or precision.emul"),
    (
        "TC051",
        {**OFFLOAD, "precision__gradient_accumulation": "fp32", "zero_stage__stage": 2},
        gpus(),
        "accumulates in bf16 in host memory",
        "zero_stage=3",
    ),
    (
        "TC051",
        {
            "precision__gradient_accumulation": "fp32",
            "precision__master_weights": "bf16",
            "precision__optimizer_states": "bf16",
        },
        gpus(),
        "keeps fp32 master weights all the same",
        "zero_stage=2",
    ),
    (
        "TC052",
        {"precision__communication": "fp16", "precision__autocast": True},
        gpus(),
        "under autocast in bf16",
        "communication=fp32 or bf16",
    ),
    (
        "TC053",
        {"precision__compute": "fp16", "precision__autocast": True},
        gpus(),
        "clips the scaled gradients",
        "precision=autocast-bf16",
    ),
    (
        "TC053",
        {
            "precision__autocast": True,
            "zero_stage__stage": 3,
            "zero_stage__quantized_weights": True,
        },
        gpus(),
        "refused by DeepSpeed",
        "quantized_weights=false",
    ),
    (
        "TC057",
        {"precision__compute": "fp16", "zero_stage__stage": 0},
        gpus(),
        "a loss scale that it never multiplied the loss with",
        "zero_stage=1",
    ),
    (
        "TC195",
        {
            "precision__compute": "fp16",
            "precision__initial_scale_power": 4,
            "precision__min_loss_scale": 32,
        },
        gpus(),
        "above the first loss scale, 16",
        "precision.min_loss_scale=16",
    ),
    ("TC058", {**FP8, "model__family": "gpt2"}, gpus(), "Conv1D", "precision=bf16"),
    ("TC058", {**FP8, "parallelism__tensor": 2}, gpus(), "not converted", "parallelism.tensor=1"),
    (
        "TC058",
        {**FP8, "model__intermediate_size": 200},
        gpus(),
        "intermediate_size=200",
        "intermediate_size=192 or 208",
    ),
    (
        "TC058",
        {**FP8, "training__sequence_length": 100},
        gpus(),
        "multiples of 16",
        "sequence_length=96 or 112",
    ),
    (
        "TC051",
        {"precision__gradient_accumulation": "fp32", "zero_stage__stage": 0},
        gpus(),
        "needs ZeRO",
        "zero_stage=1",
    ),
    (
        "TC051",
        {"precision__gradient_accumulation": "fp16"},
        gpus(),
        "weights are bf16",
        "=bf16 or fp32",
    ),
    ("TC052", {"precision__communication": "fp8"}, gpus(), "fp8", "communication=bf16"),
    (
        "TC053",
        {"precision__autocast": True, "precision__compute": "fp32"},
        gpus(),
        "is fp32",
        "compute=bf16",
    ),
    ("TC054", {"precision__master_weights": "fp16"}, gpus(), "are bf16", "fp32 or bf16"),
    ("TC054", {"precision__master_weights": "bf16"}, gpus(), "too", "optimizer_states=bf16"),
    ("TC054", {"precision__optimizer_states": "bf16"}, gpus(), "needs", "master_weights=bf16"),
    ("TC054", {"precision__optimizer_states": "fp8"}, gpus(), "not kept", "adamw_8bit"),
    (
        "TC054",
        {
            "precision__master_weights": "bf16",
            "precision__optimizer_states": "bf16",
            "zero_stage__stage": 0,
        },
        gpus(),
        "needs ZeRO",
        "zero_stage=1",
    ),
    (
        "TC054",
        {"precision__compute": "fp16", "precision__master_weights": "fp16"},
        gpus(),
        "host memory",
        "offload.optimizer=cpu",
    ),
    (
        "TC055",
        {
            "optimizer__kind": "lamb",
            "precision__compute": "fp16",
            "precision__loss_scale": 128.0,
            "script": "train.py",
        },
        gpus(),
        "adaptive",
        "loss_scale=0",
    ),
    *(
        (
            "TC056",
            {"optimizer__kind": kind, "script": "train.py"},
            cpus(),
            "GPU kernel",
            "optimizer=adamw",
        )
        for kind in ("lion", "lamb")
    ),
    (
        "TC059",
        {"optimizer__kind": "adamw_8bit", "parallelism__tensor": 2},
        gpus(),
        "its blocks of 256 would be others",
        "parallelism.tensor=1, or optimizer=adamw",
    ),
    (
        "TC059",
        {
            "optimizer__kind": "lamb",
            "parallelism__tensor": 2,
            "zero_stage__stage": 3,
            "model__vocab_size": 50257,
        },
        gpus(),
        "unequal shares of the vocabulary",
        "zero_stage=2, or model.vocab_size=50258",
    ),
    (
        "TC059",
        {**OFFLOAD, "optimizer__kind": "adamw_8bit"},
        gpus(),
        "no kernel that updates its states in host memory",
        "offload=none, or optimizer=adamw",
    ),
    (
        "TC059",
        {
            "optimizer__kind": "lion",
            "precision__master_weights": "bf16",
            "precision__optimizer_states": "bf16",
        },
        gpus(),
        "drops what a step adds to it",
        "precision.master_weights=fp32",
    ),
    (
        "TC060",
        {"optimizer__groups": [{"match": "lm_haed"}]},
        gpus(),
        "'lm_haed' matches no parameter",
        "model.embed_tokens.weight",
    ),
    (
        "TC060",
        {"optimizer__groups": [{"match": "norm"}, {"match": "model.norm"}]},
        gpus(),
        "optimizer.groups[1]",
        "the names are such as",
    ),
    ("TC060", {"optimizer__groups": [{"match": "("}]}, gpus(), "regular expression", "such as"),
    (
        "TC060",
        {"optimizer__groups": [{"match": "norm", "lr_factor": 0.0}]},
        gpus(),
        "lr_factor=0 is not above 0",
        "lr_factor: 1",
    ),
    (
        "TC061",
        {"optimizer__kind": "lamb", "optimizer__fused": True},
        gpus(),
        "no fused kernel",
        "optimizer.fused=null",
    ),
    (
        "TC061",
        {"optimizer__kind": "lion", "optimizer__fused": True},
        cpus(),
        "a GPU's",
        "optimizer.fused=null",
    ),
    ("TC070", {"model__family": "hf"}, gpus(), "config.json", "model.path="),
    ("TC071", {"model__hidden_size": 130}, gpus(), "=130", "hidden_size=128 or 132"),
    ("TC071", {"model__num_key_value_heads": 3}, gpus(), "=3 does not divide", "=4"),
    (
        "TC071",
        {"model__family": "gpt2", "model__num_key_value_heads": 2},
        gpus(),
        "grouped-query",
        "leave it out",
    ),
    (
        "TC071",
        {"model__family": "gpt2", "model__head_dim": 64},
        gpus(),
        "share model.hidden_size=128 evenly",
        "head_dim=32",
    ),
    ("TC072", {"model__vocab_size": 256}, gpus(), "257", "vocab_size=257"),
    ("TC075", {"checkpoint__best_of": "accuracy"}, gpus(), "no metric", "best_of=loss"),
    ("TC176", {"checkpoint__mirror": "memory://a"}, gpus(), "is none of s3", "s3://BUCKET"),
    ("TC176", {"checkpoint__mirror": "/mnt/a"}, gpus(), "a path is none", "file:///mnt/a"),
    ("TC176", {"checkpoint__mirror": "file://a/b"}, gpus(), "no absolute", "file:///a/b"),
    ("TC176", {"checkpoint__mirror": "s3://b/"}, gpus(), "a whole bucket", "s3://b/runs/NAME"),
    (
        "TC092",
        {"deepspeed": {"tensorboard": {"enabled": True}}},
        gpus(),
        "deepspeed.tensorboard is trainctl's to set",
        "use tensorboard in logging.to: this would get nothing but the learning rate, and begin "
        "again at 0 after a resume",
    ),
    (
        "TC092",
        {"deepspeed": {"csv_monitor": {"enabled": True}}},
        gpus(),
        "deepspeed.csv_monitor is trainctl's to set",
        "every run has its steps as tables: RUN/steps/attempt-N.csv",
    ),
    ("TC078", {"logging__deepspeed_level": "loud"}, gpus(), "loud", "warning"),
    (
        "TC089",
        {"launcher__kind": "ssh", "launcher__hosts": ["-oProxyCommand=id"]},
        gpus(8),
        "'-oProxyCommand=id' is not a host name",
        "letters, digits",
    ),
    (
        "TC089",
        {"launcher__kind": "ssh", "launcher__hosts": ["a"], "launcher__interface": "a;b"},
        gpus(8),
        "network interface",
        "eth0",
    ),
    ("TC080", {"logging__profile_steps": [3]}, gpus(), "first and a last", "profile_steps=[3,3]"),
    ("TC080", {"logging__profile_steps": [5, 2]}, gpus(), "first and a last", "[2,5]"),
    ("TC080", {"logging__profile_steps": [0, 2]}, gpus(), "counted from 1", "[1,2]"),
    (
        "TC080",
        {"logging__profile_steps": [1, 2], "logging__profile_ranks": [0, 8]},
        gpus(8),
        "not there: the plan has 8",
        "profile_ranks=[0]",
    ),
    (
        "TC080",
        {"logging__profile_steps": [1, 2], "logging__profile_ranks": []},
        gpus(8),
        "names no rank",
        "profile_ranks=[0]",
    ),
    ("TC090", {"deepspeed": {"gradient_cliping": 1}}, gpus(), "no key", "gradient_clipping?"),
    ("TC090", {"deepspeed": {"elasticity": {}}}, gpus(), "removed", "use train_batch_size"),
    (
        "TC090",
        {"deepspeed": {"aio": {"thread_count": 4}}},
        gpus(),
        "no key aio.thread_count",
        "use aio.intra_op_parallelism",
    ),
    (
        "TC069",
        {**DEEPCOMPILE, "gradients__noise": 0.1, "gradients__clip_value": 1.0},
        gpus(),
        "gradients.noise=0.1 with kernels.compile=deepcompile: the compiled graph",
        "leave kernels.compile out",
    ),
    *(
        (
            "TC069",
            {"offload__optimizer": "cpu", "offload__super_offload": True, "zero_stage__stage": 3}
            | SAVES
            | changes,
            gpus(),
            "with offload.super_offload=true: another process has the gradients",
            "leave offload.super_offload out",
        )
        for changes in (
            {"gradients__centralize": True},
            {"gradients__adaptive_clipping": "mean"},
            {"optimizer__groups": [{"match": "norm", "gradient_clipping": 0.1}]},
            {"stability__norm_spike_factor": 9.0},
            {"stability__norm_limit": 9.0},
            {"stability__on_bad_loss": "rewind"},
            {"stability__on_bad_loss": "skip_step"},
        )
    ),
    (
        "TC093",
        {"stability__on_bad_loss": "rewind"},
        gpus(),
        "no checkpoint is saved before the end",
        "checkpoint.every_steps=100",
    ),
    (
        "TC090",
        {"deepspeed": {"zero_optimization": {"mics_shard_size": 2}}},
        gpus(),
        "zero_optimization.mics_shard_size has been removed",
        "use zero_optimization.zero_hpz_partition_size",
    ),
    ("TC094", {"model__num_layers": 0}, gpus(), "model.num_layers=0", "model.num_layers=1"),
    (
        "TC094",
        {"model__intermediate_size": 0},
        gpus(),
        "model.intermediate_size=0",
        "model.intermediate_size=1",
    ),
    (
        "TC081",
        {"activation_checkpointing__mode": "full", "model__num_layers": 0},
        gpus(),
        "recomputes 0 blocks",
        "model.num_layers=1",
    ),
    (
        "TC081",
        {"activation_checkpointing__mode": "full", "activation_checkpointing__every_kth_block": 5},
        gpus(),
        "the model has 4 blocks",
        "every_kth_block=4 or less",
    ),
    ("TC083", PARTITIONED, gpus(), "parallelism.tensor=1", "parallelism.tensor=2"),
    (
        "TC083",
        {**PARTITIONED, "parallelism__tensor": 2, "parallelism__sequence_sharded_norms": True},
        gpus(),
        "a slice already",
        "partition_across_tensor_ranks=false",
    ),
    ("TC085", {"kernels__liger": True}, cpus(2), "needs a GPU", "kernels.liger=false"),
    (
        "TC085",
        {"kernels__cross_entropy": "liger_fused"},
        cpus(2),
        "needs a GPU",
        "kernels.cross_entropy=chunked",
    ),
    (
        "TC085",
        {"kernels__liger": True, "model__family": "gpt2"},
        gpus(),
        "is for llama, mistral, qwen3, and the model is gpt2",
        "kernels.liger=false",
    ),
    (
        "TC085",
        {"kernels__liger": True, "parallelism__pipeline": 2},
        gpus(),
        "pipeline stages",
        "parallelism.pipeline=1",
    ),
    (
        "TC086",
        {"kernels__cross_entropy": "liger_fused", "model__family": "hf", "model__path": "m"},
        gpus(),
        "is not known",
        "kernels.cross_entropy=chunked",
    ),
    (
        "TC086",
        {"kernels__cross_entropy": "chunked", "parallelism__pipeline": 2},
        gpus(),
        "the loss from logits",
        "kernels.cross_entropy=plain",
    ),
    (
        "TC086",
        {"kernels__cross_entropy": "liger_fused", "parallelism__tensor": 2},
        gpus(),
        "splits it",
        "kernels.cross_entropy=chunked",
    ),
    *(
        ("TC375", {"kernels__mlp_tiles": 4, **beside}, gpus(), words, "kernels.mlp_tiles=1")
        for beside, words in (
            ({"model__family": "hf", "model__path": "m", "model__num_experts": 8}, "experts take"),
            (
                {
                    "model__family": "hf",
                    "model__path": "m",
                    "model__anatomy": ["model.layers.0.fc1.weight 8x8 weight"],
                },
                "has no module for its feed-forward layer",
            ),
            ({"kernels__compile": "blocks"}, "compiles whole blocks"),
            ({"activation_checkpointing__mode": "selective"}, "which is what tiles are to save"),
            (
                {"parallelism__tensor": 2, "parallelism__sequence_sharded_norms": True},
                "along the sequence",
            ),
        )
    ),
    (
        "TC375",
        {"kernels__mlp_tiles": 1_000_000},
        gpus(),
        "a rank's micro-batch has",
        "kernels.mlp_tiles=1",
    ),
    (
        "TC087",
        {
            "kernels__compile": "blocks",
            "activation_checkpointing__mode": "selective",
            "zero_stage__stage": 3,
        },
        gpus(),
        "hooks would cut the graph",
        "activation_checkpointing=full",
    ),
    (
        "TC087",
        {"kernels__compile": "blocks", "parallelism__sequence": 2},
        gpus(),
        "parallelism.sequence=2",
        "kernels.compile=none",
    ),
    ("TC088", DEEPCOMPILE, cpus(2), "for NVIDIA GPUs", "kernels.compile=none"),
    ("TC088", {**DEEPCOMPILE, "zero_stage__stage": 0}, gpus(), "fall back", "zero_stage=3"),
    (
        "TC088",
        {**DEEPCOMPILE, "parallelism__tensor": 2},
        gpus(),
        "data parallelism only",
        "parallelism.tensor=1",
    ),
    (
        "TC088",
        {**DEEPCOMPILE, "activation_checkpointing__mode": "full"},
        gpus(),
        "decides itself",
        "activation_checkpointing=none",
    ),
    ("TC088", {**DEEPCOMPILE, **NVME, "offload__nvme_path": "/n"}, gpus(), "NVMe", "offload=cpu"),
    (
        "TC088",
        {**DEEPCOMPILE, "kernels__cross_entropy": "chunked"},
        gpus(),
        "cut its graph",
        "cross_entropy=plain",
    ),
    (
        "TC090",
        {"deepspeed": {"zero_optimization": {"round_robin_gradient": True}}},
        gpus(),
        "no key zero_optimization.round_robin_gradient",
        "zero_optimization.round_robin_gradients?",
    ),
    ("TC091", {"deepspeed": {"aio": {"queue_depth": "auto"}}}, gpus(), '"auto"', "give the value"),
    (
        "TC092",
        {"deepspeed": {"fp16": {"enabled": True}}},
        gpus(),
        "deepspeed.fp16.enabled=True contradicts fp16.enabled=False, which comes from: "
        "precision.compute=bf16",
        "fp16.enabled",
    ),
    ("TC092", {"deepspeed": {"scheduler": {}}}, gpus(), "trainctl's to set", "schedule group"),
    ("TC092", {"deepspeed": {"zero_optimization": True}}, gpus(), "contradicts", "leave"),
    (
        "TC430",
        {"deepspeed": {"aio": {"queue_depth": 4}}},
        gpus(),
        "deepspeed.aio.queue_depth=4 does nothing here: it needs offload to NVMe",
        "leave it out",
    ),
    (
        "TC480",
        {**READ, "model__anatomy": ["model encoder", *SMALL]},
        gpus(1),
        "objective.kind=next_token with theirs, an encoder: a token sees the next one",
        "objective=masked",
    ),
    (
        "TC480",
        {"objective__kind": "masked"},
        gpus(1),
        "objective.kind=masked with llama: its tokens attend to earlier ones alone",
        "objective=next_token, or model.path of a bert or modernbert",
    ),
]

WARNINGS = [
    (
        "TC368",
        {
            "data__kind": "chat",
            "data__paths": ["a.jsonl"],
            "data__packing": Packing.best_fit,
            "data__mask_documents": False,
        },
        gpus(),
        "a conversation sees those before it",
    ),
    (
        "TC381",
        {"training__freeze": ["lm_head"], "model__tie_word_embeddings": True},
        gpus(),
        "model.embed_tokens.weight and lm_head.weight are one tensor",
    ),
    (
        "TC531",
        {**SHARDED, "zero_stage__shard_group_size": 4},
        gpus(6, nodes=2),
        "shard groups of 4 devices cross nodes of 6 devices",
    ),
    ("TC341", {**mixed(), "data__max_bytes": 5}, gpus(), "data.max_bytes has no effect"),
    (
        "TC361",
        mixed(code={"kind": "tokens", "paths": ["a.bin"], "on_bad_text": "skip"}),
        gpus(),
        "data.sources.code.on_bad_text has no effect",
    ),
    (
        "TC155",
        {**EXPERTS, "experts__auxiliary_loss": 0.0},
        gpus(),
        "nothing keeps the 8 experts equally busy",
    ),
    ("TC099", {"experts__z_loss": 0.1}, gpus(), "experts.z_loss=0.1 has no effect"),
    ("TC099", {"data__sort_bytes": 1 << 20}, gpus(), "data.filters or data.decontaminate"),
    ("TC018", {**MUP, "gradients__clip_value": 0.1}, gpus(1), "1 / 2 of the base's"),
    ("TC018", {**MUP, "gradients__noise": 0.1}, gpus(1), "gradients.noise=0.1 with"),
    ("TC024", {"schedule__warmup_steps": 101}, gpus(), "longer than the run of 100 steps"),
    (
        "TC066",
        {"schedule__kind": "wsd", "schedule__warmup_steps": 10, "schedule__decay_steps": 99},
        gpus(),
        "more than the run of 100 steps has left after 10 of warmup",
    ),
    ("TC002", {"parallelism__tensor": 4, "launcher__kind": "slurm"}, gpus(6, nodes=2), "4"),
    ("TC007", {"parallelism__pipeline": 4}, gpus(), "idle 75%"),
    ("TC026", {"training__global_batch_tokens": 20_000}, gpus(8), "rounded to 16384 (-18.1%)"),
    (
        "TC067",
        {"training__steps": None, "training__epochs": 2.0},
        gpus(),
        "depends on the corpus, which has not been read here yet: 1000 stand for it",
    ),
    ("TC023", {"training__stop_after_steps": 101}, gpus(), "end of the run at step 100"),
    ("TC040", {"checkpoint__weights_only_every_steps": 101}, gpus(), "saves nothing in 100 steps"),
    ("TC076", {"checkpoint__at_end": False}, gpus(), "no checkpoint"),
    (
        "TC079",
        {"optimizer__kind": "adafactor", "script": "train.py"},
        gpus(),
        "saves no memory",
    ),
    ("TC080", {"logging__profile_steps": [101, 102]}, gpus(), "last step, 100"),
    (
        "TC084",
        {
            "activation_checkpointing__mode": "full",
            "activation_checkpointing__offload_to_cpu": True,
        },
        cpus(),
        "in host memory already",
    ),
    (
        "TC062",
        {"schedule__kind": "milestones", "schedule__milestones": [50, 100, 200]},
        gpus(),
        "the run of 100 steps ends before [100,200]",
    ),
    ("TC099", {"training__tokens": 1000}, gpus(), "training.steps=null"),
]


def findings_of(rule, changes, hardware):
    resolution = resolve(config_with(**changes), hardware)
    return resolution, [finding for finding in resolution.findings if finding.rule == rule]


@pytest.mark.parametrize(("rule", "changes", "hardware", "message", "hint"), ERRORS)
def test_an_error_says_what_is_wrong_and_what_would_be_right(
    rule, changes, hardware, message, hint
):
    resolution, found = findings_of(rule, changes, hardware)
    assert resolution.plan is None
    assert any(message in finding.message and hint in finding.hint for finding in found), found
    assert all(finding.severity is Severity.error for finding in found)
    for finding in found:
        top = finding.key.split(".")[0]
        assert find_leaf(tuple(finding.key.split("."))) or top in ("deepspeed", "parallelism")


@pytest.mark.parametrize(("rule", "changes", "hardware", "message"), WARNINGS)
def test_a_warning_leaves_the_plan(rule, changes, hardware, message):
    resolution, found = findings_of(rule, changes, hardware)
    assert resolution.plan is not None, resolution.findings
    assert any(message in finding.message for finding in found), resolution.findings
    assert all(finding.severity is Severity.warning for finding in found)


def test_every_rule_has_a_case_here():
    assert {rule.code for rule in PLAN_RULES} == {case[0] for case in [*ERRORS, *WARNINGS]}


def test_identifiers_are_unique_and_in_order():
    identifiers = [rule.code for rule in PLAN_RULES]
    assert identifiers == sorted(set(identifiers))


def test_every_rule_says_in_its_docstring_what_it_holds():
    assert all(rule.title and rule.cause and rule.fix for rule in PLAN_RULES)


@pytest.mark.parametrize("hardware", [cpus(1), cpus(2), gpus(1), gpus(8)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_config_has_no_findings(hardware, stage):
    assert resolve(config_with(zero_stage__stage=stage), hardware).findings == ()


def test_all_problems_are_found_in_one_go_even_without_a_mesh():
    config = config_with(
        parallelism__tensor=3,
        training__steps=None,
        checkpoint__best_of="accuracy",
        precision__compute="fp8",
        deepspeed={"fp16": {"enabled": True}, "train_batch_size": 7, "zero_optimisation": {}},
    )
    rules = [finding.rule for finding in resolve(config, cpus(2)).findings]
    assert {"TC001", "TC003", "TC022", "TC050", "TC075", "TC090", "TC092"} <= set(rules)


@pytest.mark.parametrize("case", [*ERRORS, *WARNINGS], ids=lambda case: case[0])
def test_a_rule_reports_the_keys_that_it_declares(case):
    rule, changes, hardware, *_ = case
    declared = next(each.keys for each in PLAN_RULES if each.code == rule)
    _, found = findings_of(rule, changes, hardware)
    assert all("*" not in each.key for each in found)
    assert all(any(fnmatch(each.key, key) for key in declared) for each in found)
