"""Measurements of engines from outside this project, and the simulator's predictions of them."""
