"""WitCert: attention over a compressed KV cache, with a machine-checked bound on what the compression moved.

Importing it registers ``attn_implementation="witcert"`` with transformers.
"""

from importlib.metadata import PackageNotFoundError, version

from . import schemes
from .attention import register
from .cache import WitCertCache
from .report import Cell, Report, StepRecord

try:
    __version__ = version("witcert")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+source"

register()

__all__ = ["Cell", "Report", "StepRecord", "WitCertCache", "__version__", "schemes"]
