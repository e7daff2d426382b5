"""The page of a study of tilings."""
