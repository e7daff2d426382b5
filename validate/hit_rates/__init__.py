"""How often attention-level speculation hits, and what it costs in answers, on a decoder trained here."""
