"""Prepared corpora that lie elsewhere, read through a bounded folder on each node.

A corpus lies there in *shards* of equally many tokens (`layout`). The order of a run says which of
them its next samples need (`lookahead`), so that they are fetched before that and removed once they
are used (`cache`), and samples are read from what is here (`reader`).
"""
