"""Loggers: each follows a run's records and sends their metrics (see `follower`)."""
