#!/usr/bin/env bash
# Conformance and tests on CUDA, then the benchmarks for a GPU: under 6 minutes on one, tables last. To $OUT, or to
# bench/results: gpu_check.log, a JSON for each part, written as its rows come, and plots; 8 files. A part that fails
# or takes too long does not stop the others. With --smoke: tiny shapes on Triton's interpreter. $PYTHON: the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-bench/results} PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/conformance${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir -p "$OUT"
: >"$OUT/gpu_check.log"
failed=0
smoke=0
[[ " $* " == *" --smoke "* ]] && smoke=1
declare -A seconds=([gpu_step]=45 [gpu_write]=30 [gpu_decode]=110)

run() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ $smoke = 1 ] && limit=900
    timeout --kill-after=5 "$limit" "$@" >"$logs/$name" 2>&1
    code=$?
    { echo "== $name"; cat "$logs/$name"; } >>"$OUT/gpu_check.log"
    echo "$name: $([ $code = 0 ] && echo done || echo "failed ($code)") in $((SECONDS - began)) s"
    return $code
}

if [ $smoke = 0 ] && ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "needs a CUDA device; --smoke runs tiny shapes without one" >&2
    exit 1
fi
# the kernels' tests on a third of the cores, conformance on the others: both mostly compile
cores=$(nproc)
if [ $smoke = 0 ]; then
    run gpu_tests 150 "$python" -m pytest tests/triton --ignore=tests/triton/test_compile.py -q --tb=short \
        -p no:cacheprovider --session-timeout=120 -n $((cores > 3 ? cores / 3 : 1)) &
    tests=$!
fi
run gpu_conformance 150 "$python" bench/gpu_conformance.py --workers $((cores > 3 ? cores - cores / 3 - 1 : 1)) "$@" || failed=1
if [ $smoke = 0 ]; then
    wait $tests || failed=1
fi
for name in gpu_step gpu_write gpu_decode; do
    run $name "${seconds[$name]}" "$python" bench/$name.py "$@" || failed=1
done
if [ $smoke = 0 ] && [ $SECONDS -lt 295 ]; then # with the time that is left; its table goes to the log only
    run gpu_tune 50 env OUT="$logs" "$python" bench/gpu_tune.py || failed=1
    tail -n 20 "$logs/gpu_tune"
fi
[ $smoke = 1 ] || tail -n 15 "$logs/gpu_tests"
for name in gpu_conformance gpu_step gpu_write gpu_decode; do
    echo "== $name"
    tail -n 40 "$logs/$name"
done
exit $failed
