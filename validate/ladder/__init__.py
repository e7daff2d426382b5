"""The validation ladder: numerics, prices, schedules, end to end."""
