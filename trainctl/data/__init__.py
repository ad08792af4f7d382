"""Corpora: what their documents are, and which of them are trained on. No torch."""
