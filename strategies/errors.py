"""The error of this layer."""

__all__ = ["ShapeError"]


class ShapeError(ValueError):
    """Tensors, channels or options do not fit together."""
