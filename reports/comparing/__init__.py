"""Two run directories beside each other: what differs in their inputs, and what that does to the results."""
