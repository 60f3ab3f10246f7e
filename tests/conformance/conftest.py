"""Makes the suite importable from a checkout that is not installed."""

import sys
from pathlib import Path

SUITE = Path(__file__).resolve().parents[2] / "conformance"
if str(SUITE) not in sys.path:
    sys.path.insert(0, str(SUITE))
