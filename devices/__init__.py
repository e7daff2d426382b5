"""What hardware there is, as data, and what an op costs on it."""
