#!/usr/bin/env bash
# The load table of docs/server-under-load.md on a GPU, about 380 s: trimtab, stock and `transformers serve --continuous-batching`
# under the same clients. tools/load_all.sh WORK OUT: random checkpoints are made in WORK, load.json, load_mixed.json, load_qwen.json
# and load.log are written in OUT. Needs the wheels of "transformers[serving]" (fastapi, openai) beside the others; PYTHONPATH as
# tools/gpu_setup.sh sets it. Every part is bounded, and what was measured stays whatever comes later.
set -u
work=$1 out=$2
mkdir -p "$work" "$out"
start=$(date +%s)
say() { echo "[$(( $(date +%s) - start ))s] $*" | cut -c1-120; }
make_model() { python3 -c "
from pathlib import Path
from bench.load import sized
sized('$1', Path('$work'), 8, device='cuda', context=1024, audio_s=5.0)" >> "$out/load.log" 2>&1; }
run() {
  local limit=$1
  shift
  timeout -k 5 "$limit" python3 -m bench.load --work "$work" --device cuda --quant nf4-dq --adapters 8 --text-tokens 512 \
    --max-tokens 128 --clients 1 8 32 --add "$@" >> "$out/load.log" 2>&1
  echo "rc $?" >> "$out/load.log"
  say "$*"
}
make_model e4b & first=$!
make_model qwen3-8b & second=$!
wait $first $second
say made
# trimtab by itself, because its kernels are timed when it starts; Poisson arrivals at 70 % behind the closed loops
run 130 --size e4b --save "$out/load.json" --seconds 18 --skip-s 8 --share 0.7 --engines trimtab
run 60 --size e4b --save "$out/load_mixed.json" --clients 32 --seconds 18 --skip-s 8 --mixed --engines trimtab
# one request at a time, both of them: short cells
run 110 --size e4b --save "$out/load.json" --seconds 8 --skip-s 2 --engines stock transformers
# a model that only reads: continuous batching on both sides
run 120 --size qwen3-8b --save "$out/load_qwen.json" --seconds 10 --skip-s 4 --engines trimtab transformers
grep -hE "^(engine|trimtab|stock|transformers|rc)|failed|Error" "$out/load.log" | cut -c1-190
