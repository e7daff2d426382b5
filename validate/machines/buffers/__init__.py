"""The buffers of models: the tensors that each op reads and writes, by model and device."""
