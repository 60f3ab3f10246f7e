"""The formal layer seen from Python: the guard of the Lean sources, the pins of the reference, links, commands."""

from witcert.spec.cli import app

__all__ = ["app"]
