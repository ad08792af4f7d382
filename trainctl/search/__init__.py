"""From a configuration to whether it can run, and to what would run instead."""
