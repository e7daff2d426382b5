"""The page of a study of single operators."""
