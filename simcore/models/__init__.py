"""What is run: the graphs of a decoder, of long convolutions, of single operators."""
