"""How good a profile is: at shapes it was not made of, against another, against others' tables."""
