"""The verified op: attention over a compressed KV cache with a proved bound on the damage.

``certified_decode``, ``quantize_`` and ``observe_`` run Triton on CUDA tensors and torch's own ops on CPU tensors, but
packed writes and plain decodes that numba compiled where it is installed. All are behind ``torch.ops.witcert.*``.
Nothing here imports the reference: the two are compared by the conformance suite only.
"""

from .budget import Budget, BudgetExhausted
from .calibration import LayerCalibration
from .layout import ObservatoryLayout, StoreLayout
from .ops import Certificate, Guarantee, certified_decode, observe_, quantize_
from .plan import Plan
from .pool import ExactPages, ObservatoryPool, PackedPool
from .telemetry import Counters, Telemetry

__all__ = [
    "Budget",
    "BudgetExhausted",
    "Certificate",
    "Counters",
    "ExactPages",
    "Guarantee",
    "LayerCalibration",
    "ObservatoryLayout",
    "ObservatoryPool",
    "PackedPool",
    "Plan",
    "StoreLayout",
    "Telemetry",
    "certified_decode",
    "observe_",
    "quantize_",
]
