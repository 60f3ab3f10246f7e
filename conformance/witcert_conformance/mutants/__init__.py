"""Planted bugs. Each is the twin with one mistake that someone has made or will make; a named property rejects it.

A module for each group of properties: a bug lies with the property that must reject it.
"""

from .registry import Mutant, mutants

IMPLIED = {
    "meter_covers_any_query": "logit_error_within_bound and meter_covers_worst_case imply it; here on real keys",
}
"""Properties without a planted bug of their own, and why."""

__all__ = ["IMPLIED", "Mutant", "mutants"]
