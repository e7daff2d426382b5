"""The studies: each puts its cases together, runs them, and says what came of them."""
