"""Configurations and checkpoints of other trainers: read, converted, and written back."""
