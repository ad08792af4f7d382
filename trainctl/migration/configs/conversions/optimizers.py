"""Optimizers by the names of transformers' `optim` and of the programs above it."""

from __future__ import annotations

from trainctl.migration.configs.import_table import Conversion

SAME = {
    "adamw": "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf adamw "
    "adamw_apex_fused adamw_anyprecision paged_adamw paged_adamw_32bit optimi_adamw flash_adamw",
    "adamw_8bit": "adamw_bnb_8bit adamw_8bit paged_adamw_8bit adamw_torch_8bit ao_adamw_8bit",
    "lion": "lion lion_32bit paged_lion_32bit paged_lion flash_lion",
    "sgd": "sgd flash_sgd",
    "muon": "muon",
}
"""Options of the group `optimizer`, each with the names that it has elsewhere."""

NEAR = {
    "adafactor": "adafactor",
    "lion_8bit": "lion",
    "paged_lion_8bit": "lion",
    "adamw_torch_4bit": "adamw_8bit",
    "ao_adamw_4bit": "adamw_8bit",
    "ao_adamw_fp8": "adamw_8bit",
    "q_galore_adamw8bit": "adamw_8bit",
    "dion": "muon",
}
"""Nearest options of optimizers that there are not; of all others it is AdamW."""

WHY_NOT = {
    "adafactor": "its learning rate is absolute there and relative to the parameters here",
    "lion_8bit": "its state has 8 bits there",
    "paged_lion_8bit": "its state has 8 bits there",
}


def choose(source: Conversion, name: str) -> str:
    """Convert the optimizer that the key `name` of a source names, and return its option."""
    theirs = str(source.get(name)).lower()
    ours = next((option for option, names in SAME.items() if theirs in names.split()), "")
    if not ours:
        nearest = NEAR.get(theirs, "adamw")
        reason = WHY_NOT.get(theirs, f"there is no optimizer {theirs}")
        source.leave(name, reason, f"optimizer={nearest}")
        source.set("optimizer", "adamw")
        return "adamw"
    source.set("optimizer", ours, name)
    if ours == "sgd":
        source.set("optimizer.momentum", 0.0)
    if ours == "muon":
        source.set("optimizer.matrix_lr", None)
    return ours
