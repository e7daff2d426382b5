"""Checks kernels, then times them beside public ones on a CUDA device."""
