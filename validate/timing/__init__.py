"""How long ops take: captured graphs, rotated buffers, kernels compiled ahead, a host at full pace."""
