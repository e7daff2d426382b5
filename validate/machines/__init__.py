"""The real machines, and what they share: the host's side, launches, cuts, ops one by one."""
