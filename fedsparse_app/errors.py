"""The error of this layer."""

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """An option that cannot be used."""
