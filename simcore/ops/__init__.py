"""What an op is: its sizes, its work and its bytes, one formula a kind."""
