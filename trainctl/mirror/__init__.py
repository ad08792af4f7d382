"""Copies of a run's checkpoints in an object store: sent, verified, listed, fetched. No torch."""
