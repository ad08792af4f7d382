"""Text of a corpus before tokenization: its files, their documents, and their problems."""
