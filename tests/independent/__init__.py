"""A second implementation of the specification, written from the Lean sources alone."""
