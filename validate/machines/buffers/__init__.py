"""Which tensors an op reads and writes, by model and device."""
