"""The page of a decode study."""
