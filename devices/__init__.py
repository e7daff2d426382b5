"""Devices, as data, and the prices of ops on them."""
