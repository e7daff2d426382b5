"""The real machines and the parts they share: the host's side, launches, cuts, ops one by one."""
