"""Serving engines with their defaults: `catalog/<engine>-<version>.yaml`, and how a scenario uses them."""
