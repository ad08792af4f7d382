"""Assessment of a configuration, and search for configurations that can run instead."""
