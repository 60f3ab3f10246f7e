#!/usr/bin/env bash
# CUDA conformance, then the benchmarks for a GPU: under 6 minutes on one, tables last. JSON, plots and logs go to $OUT,
# or to bench/results. With --smoke: tiny shapes on Triton's interpreter, no conformance. $PYTHON: the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-bench/results}
python=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH="$PWD:$PWD/conformance${PYTHONPATH:+:$PYTHONPATH}"
failed=0
declare -A seconds=([gpu_step]=40 [gpu_write]=30 [gpu_decode]=110)

run() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    code=$?
    echo "$name: $([ $code = 0 ] && echo done || echo "failed ($code), see $OUT/$name.log") in $((SECONDS - began)) s"
    [ $code = 0 ] || failed=1
}

if [[ " $* " != *" --smoke "* ]]; then
    run gpu_conformance 170 "$python" -c "
import os
from pathlib import Path
from witcert_conformance import release_check
report = Path(os.environ['OUT'], 'gpu_conformance.json')
raise SystemExit(release_check(['triton-cuda'], profile='quick', report=report))"
fi
for name in gpu_step gpu_write gpu_decode; do
    run "$name" "${seconds[$name]}" "$python" "bench/$name.py" "$@"
done
for name in gpu_step gpu_write gpu_decode; do
    echo "== $name"
    cat "$OUT/$name.log"
done
exit $failed
