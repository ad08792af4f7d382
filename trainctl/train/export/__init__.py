"""Exports of checkpoints: formats that other programs load."""
