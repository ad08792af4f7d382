"""Callbacks of the training loop: trainctl's own, and the user's (`trainctl.options.callbacks`)."""
