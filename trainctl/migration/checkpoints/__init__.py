"""Checkpoints of other trainers: read by streaming into a run, and written back from one."""
