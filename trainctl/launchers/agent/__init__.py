"""The agent: the supervisor of one node. It prepares the corpus, starts the ranks and ends them.
Imports torch.
"""
