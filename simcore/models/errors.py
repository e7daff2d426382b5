"""What is raised where a model's configuration cannot be used."""


class ModelError(ValueError):
    """A model configuration that cannot be used; the message says which field, and why."""
