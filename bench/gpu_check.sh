#!/usr/bin/env bash
# CUDA conformance, then the benchmarks; under 6 minutes on one GPU. JSON goes to $OUT, or to bench/results.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-bench/results}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/conformance${PYTHONPATH:+:$PYTHONPATH}"
timeout 200 python3 -c "
from pathlib import Path
from witcert_conformance import release_check
raise SystemExit(release_check(['triton-cuda'], profile='quick', report=Path('$out/gpu_conformance.json')))"
conformance=$?
timeout 150 python3 bench/gpu_decode.py
benchmark=$?
echo "conformance: $([ $conformance = 0 ] && echo passed || echo "failed ($conformance)"), benchmark: $([ $benchmark = 0 ] && echo done || echo "failed ($benchmark)")"
exit $((conformance | benchmark))
