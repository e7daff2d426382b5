"""How often attention-level speculation hits, and what it costs in answers: a study on a small trained decoder."""
