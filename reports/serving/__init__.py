"""The page of a serving study."""
