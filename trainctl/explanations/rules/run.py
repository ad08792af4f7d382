"""Rules of the model, launchers, kernels, objectives and passthrough keys: TC070 to TC430."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

ENTRIES: dict[str, RuleText] = {
    "TC070": RuleText(
        "The family hf takes its shape, and mostly its weights, from a directory of transformers.",
        "model.path=DIR, where DIR has config.json.",
        situation="`model.family=hf` without a directory",
        message="model.family=hf needs model.path, a transformers directory with config.json",
    ),
    "TC071": RuleText(
        "Heads share the width evenly, and query heads share key-value heads evenly.",
        "The nearest sizes that the message names, or model.head_dim, which frees the width.",
        "recipe=tiny model.num_key_value_heads=3",
    ),
    "TC072": RuleText(
        "An id without a row in the embedding is an index error in the first batch that has it.",
        "model.vocab_size at least the ids of the tokenizer; a multiple of 64 is faster on GPUs.",
        "recipe=tiny model.vocab_size=256",
    ),
    "TC073": RuleText(
        "Only the tokenizer of bytes needs no file. Planning needs none either.",
        "tokenizer.path: a directory that transformers wrote, or a tokenizer.json.",
        "recipe=tiny tokenizer=hf",
        title="A tokenizer that is read from a file, and no file is named.",
    ),
    "TC074": RuleText(
        "data=files and its like read what data.paths names, and nothing is named. Planning needs "
        "no data.",
        "data.paths with files, folders or patterns.",
        "recipe=tiny data=files",
        title="Data that is read from files, and none are named.",
    ),
    "TC078": RuleText(
        "DeepSpeed looks the level up by name and fails at the start for one that it does not "
        "know.",
        "debug, info, warning, error or critical.",
        "recipe=tiny logging.deepspeed_level=loud",
    ),
    "TC080": RuleText(
        "The profiler records a window of steps on named ranks; one outside the run writes "
        "nothing.",
        "logging.profile_steps=[FIRST,LAST], counted from 1, late enough that the first steps are "
        "over.",
        "recipe=tiny logging.profile_steps=[3]",
    ),
    "TC081": RuleText(
        "Recomputation works on whole blocks, every k-th of them. One that reaches none saves "
        "nothing.",
        "every_kth_block at most the number of blocks.",
        "recipe=tiny activation_checkpointing=full activation_checkpointing.every_kth_block=5",
    ),
    "TC083": RuleText(
        "With tensor parallelism all ranks of a group keep the same input of a block; a slice on "
        "each suffices. Alone, or with norms that are sharded already, there is nothing to slice.",
        "parallelism.tensor above 1, or leave it out.",
        "recipe=tiny activation_checkpointing=full "
        "activation_checkpointing.partition_across_tensor_ranks=true",
    ),
    "TC084": RuleText(
        "Inputs of blocks are copied from the device to the host and back. On a CPU both are the "
        "same memory.",
        "Leave it out on CPUs.",
        "recipe=tiny activation_checkpointing=full activation_checkpointing.offload_to_cpu=true",
    ),
    "TC085": RuleText(
        "Liger's kernels are Triton code for GPUs, written for one architecture each, and replace "
        "modules that a pipeline cuts apart.",
        "kernels.liger=false; kernels.cross_entropy=chunked saves the memory of logits anywhere.",
        "recipe=tiny kernels.liger=true",
    ),
    "TC086": RuleText(
        "A loss without all logits takes the last hidden states and the head itself. That needs a "
        "model that does nothing else in between, on a rank that has all of the head.",
        "kernels.cross_entropy=chunked, or plain.",
        "recipe=tiny kernels.cross_entropy=chunked parallelism.pipeline=2 zero_stage=1",
    ),
    "TC087": RuleText(
        "torch.compile makes one graph of a block. Inside it no operation is chosen for "
        "recomputation, and Ulysses' exchanges cannot be traced.",
        "activation_checkpointing=full beside it, or kernels.compile=none.",
        "recipe=tiny kernels.compile=blocks activation_checkpointing=selective",
    ),
    "TC088": RuleText(
        "DeepCompile rewrites the graph of the whole model and moves its own communication into "
        "it: data parallel on NVIDIA GPUs, without what cuts the graph.",
        "kernels.compile=none, or without the setting that the message names.",
        "recipe=tiny kernels.compile=deepcompile",
    ),
    "TC089": RuleText(
        "A host, an interface or a partition is handed to ssh, srun or mpirun. A name that begins "
        "with a dash, or holds what a shell reads, would be an option or a command there.",
        "Letters, digits, dots and dashes.",
        "recipe=tiny launcher=ssh \"launcher.hosts=['-oProxyCommand=id']\"",
    ),
    "TC090": RuleText(
        "`deepspeed.*` goes into DeepSpeed's JSON as it is. DeepSpeed ignores an unknown key at "
        "the top in silence, so a typing mistake changes nothing, and nobody notices.",
        "The key that the message proposes.",
        "recipe=tiny +deepspeed.gradient_cliping=1",
    ),
    "TC091": RuleText(
        '"auto" is filled in by accelerate or transformers on the way. Nobody does it here; '
        "DeepSpeed itself drops it in a section, and fails on it at the top.",
        "The value, or leave the key out: trainctl derives what it can.",
        "recipe=tiny '+deepspeed.aio={queue_depth: auto}'",
    ),
    "TC092": RuleText(
        "The plan, the budget and the trainer go by the configuration. A passed-through key that "
        "says something else would train what was neither checked nor budgeted. The same holds of "
        "keys that the trainer counts on: with `gradient_allreduce_op=sum` every gradient norm "
        "would be as many times too large as there are ranks.",
        "Change the configuration's own key; `trainctl config why KEY` names it.",
        "recipe=tiny '+deepspeed.fp16={enabled: true}'",
    ),
    "TC094": RuleText(
        "A size of 0 stands for one that a directory or your own function will give. Here nobody "
        "does.",
        "The size, or model=hf with a directory.",
        "recipe=tiny model.num_layers=0",
    ),
    "TC099": RuleText(
        "The setting is read by nobody in this plan: what would read it is switched off. It was "
        "typed for a reason, which is not met.",
        "Leave it out, or switch on what the message names.",
        "recipe=tiny experts.z_loss=0.1",
    ),
    "TC144": RuleText(
        "`model.weights` says whether a model starts from trained or from random weights, and "
        "`model.initial_weights` from which. Either they contradict each other, or an adapter, "
        "conversations, pairs of answers or a recipe that fine-tunes would train a random model. "
        "Planning needs no weights.",
        "model=hf model.path=DIR or model.initial_weights=DIR; model.weights=random where random "
        "weights are meant.",
        "recipe=tiny adapter=lora",
        title="Weights of step 0 that are missing, or named twice.",
    ),
    "TC153": RuleText(
        "Of each architecture transformers has some kinds of attention only: scores that are "
        "capped or extended have no sdpa.",
        "The kind that the message names; eager is always there, and slowest.",
        situation="A directory of a model whose attention caps its scores, with "
        "`model.attention=sdpa`",
        message="model.attention=sdpa: transformers has none for theirs (its attention caps or "
        "extends the scores)",
    ),
    "TC155": RuleText(
        "A router learns to prefer what already works. Without a balancing loss or a moved bias a "
        "few experts get all tokens, and the others' weights are wasted.",
        "experts.auxiliary_loss=0.01, or experts.bias_update.",
        situation="A model with 8 experts, `experts.auxiliary_loss=0`",
        message="nothing keeps the 8 experts equally busy",
    ),
    "TC370": RuleText(
        "A recurrent layer (Mamba and its like) carries a state from token to token. Attention "
        "can be masked at the end of a document; the state goes on into the next.",
        "data.mask_documents=false, or a model without such layers.",
        situation="A directory of a recurrent model, with `data.mask_documents=true`",
        message="data.mask_documents=true: theirs carries a state from token to token, which "
        "nothing resets where a document ends",
    ),
    "TC375": RuleText(
        "A feed-forward layer can be computed a piece of the tokens at a time, which saves memory "
        "at long sequences. It has to treat each token by itself, and what is kept of it must not "
        "undo the saving.",
        "kernels.mlp_tiles=1, or without what the message names.",
        "recipe=tiny kernels.mlp_tiles=4 activation_checkpointing=selective",
    ),
    "TC371": RuleText(
        "A checkpoint of an adapter or of some weights has no others: it needs its base for as "
        "long as it is used, and a run removes its older checkpoints as it goes on.",
        "trainctl export RUN DIR, and model.path=DIR.",
        title="Frozen weights in a checkpoint of another run, which may remove it.",
        situation="`adapter=lora model.initial_weights=runs/base`",
        message="what is trained stands on a checkpoint of runs/base, which that run removes when "
        "it goes on and keeps checkpoint.keep of them",
    ),
    "TC376": RuleText(
        "Adapters are put beside linear layers that are chosen by the end of their name; a name "
        "that no layer has would leave it without one.",
        "Names of the model's own layers: the message lists them.",
        "recipe=tiny adapter=lora adapter.targets=[q_prj,v_proj]",
    ),
    "TC377": RuleText(
        "An entry of training.freeze that meets no parameter freezes nothing, mostly for a typing "
        "mistake.",
        "A part of a parameter's name, a word such as embeddings, or all_but_last_blocks:N.",
        "recipe=tiny training.freeze=[embed_tokns]",
    ),
    "TC378": RuleText(
        "With everything frozen there is no gradient and nothing to update; an adapter freezes "
        "the rest by itself.",
        "Leave something out of training.freeze.",
        "recipe=tiny 'training.freeze=[.]'",
    ),
    "TC379": RuleText(
        "Frozen weights and adapters were shown to train as one process does with most of the "
        "rest, and with some it was not, or cannot be.",
        "The value that the message names.",
        "recipe=tiny adapter=lora model.mup=true model.mup_base_width=64",
    ),
    "TC380": RuleText(
        "Each pipeline stage has an optimizer of its own, and DeepSpeed fails on one without a "
        "parameter.",
        "Fewer stages, parallelism.stage_blocks that give each stage such a block, or another "
        "choice of what is frozen.",
        "recipe=tiny zero_stage=1 parallelism.pipeline=2 "
        "'training.freeze=[\"all_but_last_blocks:1\"]'",
    ),
    "TC381": RuleText(
        "With tied embeddings the embedding and the head are one tensor: to freeze one is to "
        "freeze both.",
        "model.tie_word_embeddings=false, if they are to differ.",
        "recipe=tiny training.freeze=[lm_head] model.tie_word_embeddings=true",
    ),
    "TC382": RuleText(
        "Weights in 8 or 4 bits carry scales along a row for each output. A shard of a matrix, or "
        "one that is stored the other way round, would be read with the wrong ones.",
        "Data parallelism, or adapter.base_weights=compute.",
        "recipe=tiny adapter=lora adapter.base_weights=nf4 parallelism.tensor=2",
    ),
    "TC383": RuleText(
        "In 4 bits a block of weights shares one scale, and a matrix that is not a whole number "
        "of blocks has a rest without one.",
        "adapter.base_weights=int8, whose scale is that of a row.",
        "recipe=tiny adapter=lora adapter.base_weights=nf4 model.hidden_size=32 "
        "model.intermediate_size=99",
    ),
    "TC384": RuleText(
        "What trains beside an adapter is named by patterns. One that meets nothing is a typing "
        "error, and a weight that an adapter is beside stays frozen.",
        "Names of parameters without an adapter: embeddings, head, or norms.",
        "recipe=tiny adapter=lora adapter.also_train=[embed_tokns]",
    ),
    "TC392": RuleText(
        "DPO and its like compare log-probabilities of whole answers, which a rank of the "
        "sequence axis or a pipeline stage does not have.",
        "Data and tensor parallelism, or objective=next_token.",
        "recipe=tiny objective=dpo parallelism.sequence=2",
    ),
    "TC393": RuleText(
        "A preference is between two answers to one prompt. Other data has no pairs, and pairs "
        "have no next token to learn.",
        "data=preferences with objective=dpo or its like.",
        "recipe=tiny objective=simpo",
    ),
    "TC401": RuleText(
        "First weights are a function of seed and name, drawn by each rank for its own part. Some "
        "models' code draws a whole tensor by a rule that has no parts.",
        "model.initial_weights=DIR with weights, or one rank.",
        situation="A directory whose code draws a tensor as a whole, without weights",
        message="the code of theirs starts model.layers.0.mixer.A_log by what cannot be done for a "
        "rank's part of it",
    ),
    "TC405": RuleText(
        "engine=fsdp2 is torch's fully_shard: data parallel, fp32 and bf16, optimizers that look "
        "at one element at a time. The rest is DeepSpeed's.",
        "engine=deepspeed, or without what the message names.",
        "recipe=tiny engine=fsdp2 zero_stage=1",
    ),
    "TC430": RuleText(
        "Nothing reads the key of DeepSpeed's that is passed through: it is for another stage of "
        "ZeRO or for offload to NVMe, for DeepSpeed's own checkpoints and data loader, or for "
        "nothing any more. It was written for a reason, which is not met.",
        "Leave it out, or switch on what the message names.",
        "recipe=tiny '+deepspeed.aio={queue_depth: 32}'",
    ),
}
