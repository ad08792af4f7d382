"""The run directory: names, attempts, atomic writes, status, records. No torch."""
