"""The real machine on a CUDA card."""
