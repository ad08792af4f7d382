"""The supervisor on a node: prepares the corpus, starts the ranks, ends them. Uses torch."""
