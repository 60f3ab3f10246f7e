"""The suite's own implementation of every contract, in plain NumPy: the ancestor of all planted bugs.

Each step is a small method, so that a planted bug is one override.
"""

from .extras import Extras


class Twin(Extras):
    """Writer, reader and every optional group that a CPU can offer."""


__all__ = ["Twin"]
