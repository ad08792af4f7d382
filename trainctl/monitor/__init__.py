"""Views of runs: loggers, alerts, the report page and `watch`."""
