"""Published and measured figures, and the comparison of predictions with them."""
