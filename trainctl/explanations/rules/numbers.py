"""Rules of number formats, optimizers and gradients: TC050 to TC061, TC069, TC079, TC195."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

ENTRIES: dict[str, RuleText] = {
    "TC050": RuleText(
        "Not every device computes in every format: fp16 has no CPU path in DeepSpeed, bf16 needs "
        "Ampere, fp8 Hopper.",
        "precision=bf16 on newer GPUs, fp16 on a T4 or V100, fp32 anywhere.",
        "recipe=tiny precision=fp16",
    ),
    "TC051": RuleText(
        "Gradients of many micro-batches are summed. DeepSpeed takes some combinations and then "
        "sums in another type than was asked for.",
        "The weights' type, or fp32 where it is really used.",
        "recipe=tiny precision=bf16 zero_stage=2 offload.optimizer=cpu "
        "precision.gradient_accumulation=fp32",
    ),
    "TC052": RuleText(
        "DeepSpeed sends gradients in the type of the weights or in fp32; anything else it "
        "replaces.",
        "precision.communication=null, or one of the two.",
        "recipe=tiny precision.communication=fp16 precision.autocast=true",
    ),
    "TC053": RuleText(
        "Autocast keeps fp32 weights and multiplies in bf16. In fp16 DeepSpeed clips gradients "
        "that are still scaled, and never lowers the scale after an overflow.",
        "precision=autocast-bf16, or plain precision=fp16 without autocast.",
        "recipe=tiny precision=fp16 precision.autocast=true",
    ),
    "TC054": RuleText(
        "Master weights keep the bits that an update in 16 bits would lose: fp32, or the compute "
        "type where DeepSpeed can update in it.",
        "precision.master_weights=fp32.",
        "recipe=tiny precision.master_weights=fp16",
    ),
    "TC055": RuleText(
        "DeepSpeed's Lamb in fp16 works with an adaptive loss scale only.",
        "precision.loss_scale=0, which is adaptive.",
        "recipe=tiny optimizer=lamb precision=fp16 precision.loss_scale=128 script=train.py",
        files={"train.py": ""},
    ),
    "TC056": RuleText(
        "A script gets DeepSpeed's own kernel of the optimizer, and those of Lion and Lamb run on "
        "GPUs only.",
        "optimizer=adamw, or GPUs.",
        "recipe=tiny optimizer=lion script=train.py",
        files={"train.py": ""},
    ),
    "TC057": RuleText(
        "Without ZeRO, DeepSpeed divides the gradients by a loss scale that it never multiplied "
        "the loss with: steps become too small by that factor, in silence.",
        "zero_stage=1, or precision=bf16, which needs no scale.",
        "recipe=tiny precision=fp16 zero_stage=0",
    ),
    "TC058": RuleText(
        "torchao replaces linear layers by products in fp8, on matrices whose sides are multiples "
        "of 16; GPT-2's are another class.",
        "precision=bf16, or a model and a batch of such sizes.",
        "recipe=tiny precision=fp8 model.family=gpt2",
    ),
    "TC059": RuleText(
        "Each optimizer has a table of what it allows. Muon orthogonalises whole matrices, so a "
        "shard of one is another update; 8-bit states have no kernel on the host.",
        "The option that the message names, or optimizer=adamw, which goes with everything.",
        "recipe=tiny optimizer=muon parallelism.tensor=2",
    ),
    "TC060": RuleText(
        "The first entry of optimizer.groups whose pattern is found in a parameter's name holds. "
        "One that meets nothing would be ignored, mostly for a typing mistake.",
        "`trainctl plan` and the message list names; special entries come before general ones.",
        "recipe=tiny 'optimizer.groups=[{match: lm_haed}]'",
    ),
    "TC061": RuleText(
        "A fused kernel makes the update in one pass. Not every kind has one, and some only on "
        "GPUs.",
        "optimizer.fused=null takes it where there is one.",
        "recipe=tiny optimizer=lamb optimizer.fused=true",
    ),
    "TC069": RuleText(
        "To clip by value, add noise, judge a norm or drop a step, the trainer needs the gradient "
        "before its update. DeepCompile, SuperOffload and ZenFlow reduce and apply it inside.",
        "The technique or the speed-up, not both.",
        "recipe=tiny kernels.compile=deepcompile gradients.clip_value=1.0",
    ),
    "TC079": RuleText(
        "Adafactor saves memory by keeping row and column sums of matrices. ZeRO 1 to 3 hands a "
        "script's optimizer flat vectors, which have no rows.",
        "zero_stage=0, or optimizer=adamw_8bit.",
        "recipe=tiny optimizer=adafactor script=train.py",
        files={"train.py": ""},
    ),
    "TC195": RuleText(
        "The fp16 loss scale falls at overflows, down to its least. One that begins below its "
        "least would be raised by an overflow.",
        "A lower min_loss_scale, or a higher initial_scale_power.",
        "recipe=tiny precision=fp16 precision.initial_scale_power=4 precision.min_loss_scale=32",
    ),
}
