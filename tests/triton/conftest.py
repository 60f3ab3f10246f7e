"""Tests here use modules of ``bench``, which is a folder of scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
