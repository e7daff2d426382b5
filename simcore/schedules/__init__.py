"""Strategies: one file each, named as in the paper it comes from."""
