"""Which requests come, when, and how long they are."""
