"""Kernels, checked, then timed beside public ones on a CUDA device."""
