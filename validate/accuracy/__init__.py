"""Accuracy of a profile: at shapes not used for it, against another profile, against others' tables."""
