"""Serving engines as they are shipped: `catalog/<engine>-<version>.yaml`, and how a scenario takes them."""
