"""Costs of ops on a device: grids of shapes, measurement, fit, profile."""
