#!/usr/bin/env bash
# Everything that claims a property of a GPU: `tools/gpu_all.sh RESULTS SECONDS` on a machine with one. All of it may take an hour.
# Timings run alone; tests and merges share the GPU afterwards. Each step has its own time limit and log. STEPS="graphs decode"
# runs some of them. What the stock stack imports must be there whole: PEFT needs transformers' Bloom, for one.
out=$1; end=$(($(date +%s) + $2)); work=${WORK:-/dev/shm/trimtab}; py=${PYTHON:-python3}
mkdir -p "$out" "$work"
export TRIMTAB_TEST_DEVICE=cuda TMPDIR=${TMPDIR:-/tmp}
step() { # NAME SECONDS COMMAND...: run within its time, and within what is left of all
  [ -n "${STEPS:-}" ] && [[ " $STEPS " != *" $1 "* ]] && return
  local name=$1 limit=$2 left=$((end - $(date +%s))) start=$(date +%s); shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  [ "$limit" -lt 5 ] && { echo "== $name: no time left"; return; }
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  echo "== $name: exit $? after $(($(date +%s) - start)) s: $(grep -v '^$' "$out/$name.log" | tail -1 | cut -c1-300)"
}
size=${SIZE:-e4b}
# Several processes for the tests where pytest-xdist is there: most of their time is compiling.
several() { $py -c "import xdist" 2> /dev/null && echo "-n $1 --dist worksteal"; }
step make 90 $py -c "
from pathlib import Path
from bench.checkpoints import write_adapter, write_checkpoint
work = Path('$work')
folder = write_checkpoint('$size', work / '$size')
for rank in (8, 64): write_adapter(folder, work / f'$size-r{rank}', rank)
import os, shutil
from bench.load import give_voice, sized
talking = work / '$size-talking'
shutil.copytree(folder, talking, copy_function=os.link)
give_voice(talking)
sized('$size', work, 8, device='cuda')" &
step kernels 240 $py -m pytest -q -p no:cacheprovider $(several 5) tests/gpu/test_kernels.py tests/gpu/test_ends.py --maxfail=12 &
step graphs 240 $py -m pytest -q -p no:cacheprovider $(several 5) tests/gpu/test_graphs.py tests/gpu/test_short_ops.py tests/gpu/test_head8.py --maxfail=12
wait
step decode 600 $py -m bench.decode --work "$work" --models $size --timeout-s 200 --save "$out/decode.json"
# The bridge's cases hold nearly all of the card: nothing else may use it meanwhile.
step merge 240 $py -m bench.merge --work "$TMPDIR/merge" --sizes $size --no-check --save "$out/merge.json" &
step bridge 120 $py -m bench.bridge --work "$work" --size $size --save "$out/bridge.json"
# With the oldest set of packages, in a folder of its own: its checkpoint is written by that release.
[ -n "${OLD_SITE:-}" ] && step bridge-old 260 env PYTHONPATH="$OLD_SITE:$PWD" $py -m bench.bridge --work "$work-old" --size $size \
  --save "$out/bridge.json"
step load 180 $py -m bench.load --work "$work" --size $size --adapters 8 --device cuda --quant nf4-dq --seconds 5 \
  --max-tokens 32 --rates 4 --save "$out/load.json"
step memory 60 $py -m pytest -q -p no:cacheprovider tests/gpu/test_memory.py tests/gpu/test_devices.py  # alone: they measure
step tests 400 $py -m pytest -q -p no:cacheprovider $(several 10) tests/gpu/test_bridge.py tests/gpu/test_verify.py \
  tests/gpu/test_merge.py tests/gpu/test_generate.py tests/gpu/test_batch.py tests/gpu/test_chat.py tests/gpu/test_load.py \
  tests/gpu/test_matrix.py &
step lanes 180 $py -m bench.lanes --work "$work" --size $size --save "$out/lanes.json" &
wait
# A memory checker over every kernel, where one is named (NVIDIA's compute-sanitizer, from a toolkit or its wheel).
if [ -n "${SANITIZER:-}" ]; then
  for tool in memcheck initcheck synccheck; do
    step "sanitizer-$tool" 270 "$SANITIZER" --tool $tool --error-exitcode 9 $py -m tests.gpu.once &
  done
  own=(); for name in native cub gemm cutlass; do own+=(--kernel-name-exclude "kns=$name"); done  # torch's kernels
  for part in 1 2 3 4 5 6 7 8 9 10; do
    step "sanitizer-racecheck-$part" 270 "$SANITIZER" --tool racecheck "${own[@]}" --error-exitcode 9 $py -m tests.gpu.once $part 10 &
  done
  wait
fi
step matrix 560 $py -m bench.matrix --device cuda --jobs 10 --save "$out/matrix_gpu_newest.json"
[ -n "${OLD_SITE:-}" ] && step matrix-old 560 env PYTHONPATH="$OLD_SITE:$PWD" $py -m bench.matrix --device cuda --jobs 10 \
  --save "$out/matrix_gpu_oldest.json"
step bench-kernels 40 $py -m bench.kernels --models $size --rows 1,8 --json "$out/kernels.json"
echo "== done with $((end - $(date +%s))) s left"
