"""What is shown of runs: loggers, alerts, the report page and `watch`."""
