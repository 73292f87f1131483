#!/usr/bin/env bash
# The load table of docs/server-under-load.md on a GPU, about 500 s: trimtab, stock and `transformers serve --continuous-batching`
# under the same clients. tools/load_all.sh WORK OUT [SECONDS]: random checkpoints are made in WORK; load_text.json, load_mixed.json,
# load_many.json, load_qwen.json and load.log are written in OUT. Needs the wheels of "transformers[serving]" (fastapi, opentelemetry-api, openai) beside
# the others; PYTHONPATH as tools/gpu_setup.sh sets it. Every part is bounded, and leaves load-PART.done in OUT: a second call does
# what is left, and ends with an error while something is.
set -u
work=$1 out=$2 end=$(($(date +%s) + ${3:-1800})) py=${PYTHON:-python3}
mkdir -p "$work" "$out"
start=$(date +%s) left=0
say() { echo "[$(( $(date +%s) - start ))s] $*" | cut -c1-120; }
run() { # PART SECONDS SIZE ADAPTERS FLAGS...
  local part=$1 limit=$2 size=$3 adapters=$4 until=$((end - $(date +%s))) code
  shift 4
  [ -e "$out/load-$part.done" ] && return
  if [ "$until" -lt 30 ]; then say "$part: no time left"; left=1; return; fi
  [ "$until" -lt "$limit" ] && limit=$until
  $py -c "
from pathlib import Path
from bench.load import sized
sized('$size', Path('$work'), $adapters, device='cuda', context=1024, audio_s=5.0)" >> "$out/load.log" 2>&1
  timeout -k 5 "$limit" $py -m bench.load --work "$work" --size "$size" --device cuda --quant nf4-dq --adapters "$adapters" \
    --text-tokens 512 --max-tokens 128 --add "$@" >> "$out/load.log" 2>&1
  code=$?
  if [ $code = 0 ]; then touch "$out/load-$part.done"; else left=1; fi
  say "$part: exit $code"
}
# trimtab by itself, because its kernels are timed when it starts; Poisson arrivals at 70 % behind the closed loops. `--rates` without
# a value: no open loop where none is in the table.
run trimtab 130 e4b 8 --clients 1 8 32 --save "$out/load_text.json" --seconds 20 --skip-s 10 --share 0.7 --engines trimtab
run mixed 70 e4b 8 --clients 32 --rates --save "$out/load_mixed.json" --seconds 20 --skip-s 10 --mixed --engines trimtab
# as many adapters as rows
run many 80 e4b 32 --clients 32 --rows 32 --rates --save "$out/load_many.json" --seconds 20 --skip-s 10 --engines trimtab
# one request at a time, both of them: short cells
run others 130 e4b 8 --clients 1 8 32 --rates --save "$out/load_text.json" --seconds 8 --skip-s 2 --engines stock transformers
run mixed-stock 70 e4b 8 --clients 32 --rates --save "$out/load_mixed.json" --seconds 10 --skip-s 2 --mixed --engines stock
# a model that only reads: continuous batching on both sides
run qwen 150 qwen3-8b 8 --clients 1 8 32 --rates --save "$out/load_qwen.json" --seconds 10 --skip-s 4 --engines trimtab transformers
grep -hE "^(engine|trimtab|stock|transformers)|failed|Error" "$out/load.log" | cut -c1-190
exit $left
