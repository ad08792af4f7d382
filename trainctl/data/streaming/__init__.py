"""Streaming of prepared corpora from remote storage, through a bounded cache folder on each node.

A remote corpus is stored as *shards* of equally many tokens (`layout`). The order of a run tells
which shards its next samples need (`lookahead`). They are fetched ahead and removed once they are
used (`cache`), and samples are read from the local shards (`reader`).
"""
