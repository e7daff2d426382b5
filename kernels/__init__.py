"""What runs on a real device: pure functions on tensors, by op kind (`table.py`), a package a family."""
