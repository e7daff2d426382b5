"""The page of a plan: the answer, what holds, and what was tried."""
