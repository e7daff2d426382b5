"""The studies: each builds its cases, runs them and reports the results."""
