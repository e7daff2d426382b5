"""MLPerf Inference results of others, and the simulator's predictions of them."""
