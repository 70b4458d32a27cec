#!/usr/bin/env bash
# Everything that only a GPU shows, in one go: tests, quickstart, overhead. Results go to $1.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
python=${PYTHON:-python3}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
$python -m pytest tests/interleaving tests/tracing -q -p no:cacheprovider > "$out/host.txt" 2>&1
tail -3 "$out/host.txt"
VLLM_ENABLE_V1_MULTIPROCESSING=1 $python -m pytest tests/gpu tests/modeling/vllm/payloads -m gpu -rA \
  -p no:cacheprovider > "$out/tests.txt" 2>&1
grep -E "lowest cosine|passed|failed|^FAILED|^ERROR|^E  " "$out/tests.txt" | cut -c1-300
$python examples/quickstart.py > "$out/quickstart.txt" 2>&1
grep -vE "WARNING|INFO|it/s" "$out/quickstart.txt" | tail -50
for mode in "" "--eager"; do
  $python benchmarks/overhead.py $mode --repeats 50 --out "$out/overhead$mode.md" \
    > "$out/overhead$mode.txt" 2>&1
  cat "$out/overhead$mode.md"
done
$python benchmarks/saves.py --device cuda --requests 64 --repeats 3 --out "$out/saves.md" \
  > "$out/saves.txt" 2>&1
cat "$out/saves.md"
