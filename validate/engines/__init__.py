"""Measured engines that nobody here wrote, beside the simulator."""
