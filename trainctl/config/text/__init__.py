"""The text of a corpus before it is tokens: its files, their documents, what is wrong there."""
