"""Strategies, one file each, named as in their papers."""
