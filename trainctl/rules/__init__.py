"""Rules that a plan and a DeepSpeed JSON must satisfy. Pure, no torch."""
