"""Ops: their sizes, their work and their bytes, one formula for each kind."""
