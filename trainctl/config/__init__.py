"""Configuration: the typed schema (standard library only) and its composition by Hydra."""
