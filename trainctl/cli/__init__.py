"""The command line: parse, call one function of another room, render."""
