"""Checkpoints: saving, restoring and exporting the state of a run."""
