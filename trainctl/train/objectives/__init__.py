"""Objectives: from log-probabilities to the loss."""
