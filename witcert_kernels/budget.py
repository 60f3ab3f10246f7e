"""The failure budget of the dithered store (paper section 4.2; Lean ``WitCert.request_budget``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from .checks import check_integer, check_range


class BudgetExhausted(RuntimeError):
    """More steps were asked for than the budget was divided by."""


@dataclass
class Budget:
    """A sequence's failure probability, divided over layers, query heads and steps.

    A batch of B sequences, beams included, is B requests: that any of their certificates fails has probability at most
    B · delta.

    Args:
        delta: probability, in (0, 1], that any certificate of one sequence fails.
        layers: attention layers of the model.
        heads: query heads a layer.
        steps: query rows that may read compressed tokens: decode steps, and prefill rows behind a stored prefix.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, by name.
    """

    delta: float
    layers: int
    heads: int
    steps: int
    spent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_range("budget.delta", self.delta, 0.0, 1.0, open_low=True)
        for name in ("layers", "heads", "steps"):
            check_integer(f"budget.{name}", getattr(self, name), 1, 2**62)

    @property
    def delta_local(self) -> float:
        """Failure probability of one certificate: ``delta / (layers * heads * steps)``."""
        return self.delta / (self.layers * self.heads * self.steps)

    def spend(self, rows: int) -> None:
        """Use up ``rows`` steps, once for all layers and heads.

        Raises:
            BudgetExhausted: fewer than ``rows`` are left; nothing is spent.
            TypeError, ValueError: not a number of rows.
        """
        check_integer("rows", rows, 0, 2**62)
        if self.spent + rows > self.steps:
            raise BudgetExhausted(
                f"budget.steps: {rows} more rows after {self.spent} would exceed the {self.steps} that delta was "
                "divided by; make a budget with more steps"
            )
        self.spent += rows
