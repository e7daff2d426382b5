"""Kernels: functions on tensors that run on a real device, by op kind (`table.py`), a package a family."""
