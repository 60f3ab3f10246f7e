"""Adapters of the implementations that this project ships, by name."""

OURS = {
    "ref": "witcert_conformance.adapters.ref:Reference",
    "torch-cpu": "witcert_conformance.adapters.kernels:TorchCpu",
    "numba-cpu": "witcert_conformance.adapters.kernels:NumbaCpu",
    "triton-interpret": "witcert_conformance.adapters.kernels:TritonInterpret",
    "triton-cuda": "witcert_conformance.adapters.kernels:TritonCuda",
    "twin": "witcert_conformance.twin:Twin",
}
"""Name to ``module:Class``; ``twin`` is the suite's own implementation, the ancestor of all planted bugs."""
