"""Sends a run's metrics to its loggers, from its records alone; see `trainctl.loggers.follower`."""
