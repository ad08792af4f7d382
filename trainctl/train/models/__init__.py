"""The model on a rank: built, initialized, traced, loaded and mapped to published weights."""
