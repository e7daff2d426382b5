"""Times of ops: captured graphs, rotated buffers, kernels compiled ahead, a host at full pace."""
