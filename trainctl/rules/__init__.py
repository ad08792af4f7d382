"""Rules: what must hold of a plan and of a DeepSpeed JSON. Pure, no torch."""
