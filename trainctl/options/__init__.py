"""The options of the groups, each a unit of its own (`trainctl.config.registry`). No torch."""
