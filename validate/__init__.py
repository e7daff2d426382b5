"""Published and measured figures, the comparison of predictions with them, and the real machines."""
