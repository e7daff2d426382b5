"""The user's input: files and fields, and the one line about each fault."""
