"""What runs on a real device: one file a kernel (none yet)."""
