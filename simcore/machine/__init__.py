"""The contract that all machines share: what programs ask for, and what a run leaves behind."""
