"""The error for a model configuration that cannot be used."""


class ModelError(ValueError):
    """A model configuration cannot be used; the message names the field and the reason."""
