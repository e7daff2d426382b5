"""simcore predicts how long LLM inference takes, by discrete-event simulation of what a real machine runs."""
