"""Sections and figures of every study."""
