"""What comes from outside: files and fields, and the one line that says what is wrong with them."""
