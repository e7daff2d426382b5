"""The real machine on a CPU."""
