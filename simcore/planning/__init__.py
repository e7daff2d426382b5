"""Plans: what to buy and how to run it, found by search over scenarios."""
