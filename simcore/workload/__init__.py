"""The requests of a run: arrival times and lengths."""
