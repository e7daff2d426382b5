"""The models: the graphs of a decoder, of long convolutions, of single operators."""
