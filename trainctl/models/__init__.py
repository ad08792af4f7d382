"""Facts about models, read from their directories."""
