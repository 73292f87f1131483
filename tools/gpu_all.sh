#!/usr/bin/env bash
# Everything that claims a property of a GPU, in steps: `tools/gpu_all.sh OUT [SECONDS]` on a machine with one; all of it takes more
# than an hour. Each step has a limit and a log in OUT, and leaves NAME.done there once it has a result: a second call with this OUT
# runs only what is left, so that several short calls do what one long one would. A step that was cut or broke runs again. Results,
# failed tests by name (failed-tests.txt) and a table (steps.txt) are in OUT too.
# STEPS="cards prompts" runs some, STEPS=round what bench/device_round.sh does. WORK: where checkpoints are made (40 GB; 75 with
# qwen3-8b). PYTHON, SANITIZER (compute-sanitizer), OLD_SITE (a folder with the oldest releases), OUTSIDER and LLAMA (see there).
# SIZE: of everything but cards and the round. What the stock stack imports must be there
# whole: PEFT needs transformers' Bloom, for one.
out=${1:?usage: tools/gpu_all.sh OUT [SECONDS]}; end=$(($(date +%s) + ${2:-3600}))
work=${WORK:-/dev/shm/trimtab}; py=${PYTHON:-python3}; size=${SIZE:-e4b}; here=$(dirname "$0")
mkdir -p "$out" "$work"
out=$(cd "$out" && pwd)
export TRIMTAB_TEST_DEVICE=cuda TMPDIR=${TMPDIR:-/tmp} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
names=()
round="tune-e4b tune-e2b tune-qwen3-vl-4b formats families families-6 families-5 attention load-outside load-long load-qwen outsider \
tests-new tests-kernels tests-steps tests-memory tests-rest peer"
[ "${STEPS:-}" = round ] && STEPS=$round

# The limit of a step: its own, or what is left of all; 0 for one that has its result, or for which no time is left.
limit_of() { # NAME SECONDS
  local left=$((end - $(date +%s)))
  if [ -n "${STEPS:-}" ] && [[ " $STEPS " != *" $1 "* ]]; then echo 0
  elif [ -e "$out/$1.done" ]; then echo 0
  elif [ "$left" -lt 10 ]; then echo 0
  elif [ "$left" -lt "$2" ]; then echo "$left"
  else echo "$2"; fi
}
step() { # NAME SECONDS COMMAND...: run within its limit; {S} in a word stands for the seconds that it has
  local name=$1 limit start code; limit=$(limit_of "$1" "$2"); shift 2
  [ "$limit" = 0 ] && return
  start=$(date +%s)
  timeout -k 5 "$limit" "${@//\{S\}/$((limit > 20 ? limit - 10 : limit))}" > "$out/$name.log" 2>&1
  code=$?
  # Of tests a failure is a result: which ones failed is in the log.
  { [ $code = 0 ] || { [ $code = 1 ] && [[ $name = tests* ]]; }; } && touch "$out/$name.done"
  printf '%s\t%s\t%s\n' "$code" "$(($(date +%s) - start))" "$limit" > "$out/$name.code"
  echo "== $name: exit $code after $(($(date +%s) - start)) s: $(tail -200 "$out/$name.log" | grep -v '^$' | tail -1 | cut -c1-200)"
}
tests() { # NAME SECONDS PROCESSES FILES...: most of the time is compiling, so that several processes pay where pytest-xdist is
  local name=tests-$1 seconds=$2 several=(); shift 2
  [ "$1" -gt 1 ] && $py -c "import xdist" 2> /dev/null && several=(-n "$1" --dist worksteal)
  shift
  step "$name" "$seconds" $py -m pytest -v -rfEs --tb=short -p no:cacheprovider "${several[@]}" "${@/#/tests/gpu/}"
}
table() {
  local name code seconds limit state
  cat "$out"/tests-*.log 2> /dev/null | grep -E '^(FAILED|ERROR) ' | sort -u > "$out/failed-tests.txt"
  for name in "${names[@]}"; do
    [ -n "${STEPS:-}" ] && [[ " $STEPS " != *" $name "* ]] && continue
    state="not run"; code="" seconds="" limit=""
    [ -e "$out/$name.code" ] && IFS=$'\t' read -r code seconds limit < "$out/$name.code"
    case "$code" in "") ;; 0) state=ok ;; 124|137) state="cut at $limit s" ;; *) state="exit $code" ;; esac
    [ -e "$out/$name.done" ] && [ "$code" = 1 ] && state="tests failed"
    printf '%-22s %-14s %6s s  %s\n' "$name" "$state" "${seconds:--}" \
      "$(tail -200 "$out/$name.log" 2> /dev/null | grep -v '^$' | tail -1 | cut -c1-110)"
  done > "$out/steps.txt"
  cat "$out/steps.txt"
  echo "$(wc -l < "$out/failed-tests.txt") tests failed (failed-tests.txt); $((end - $(date +%s))) s left"
}
trap table EXIT
plan() { names+=("$@"); }  # the order of the table

plan tune-e4b tune-e2b tune-qwen3-vl-4b formats families families-6 families-5 attention load-outside load-long load-qwen
# 0. Launch configurations of this card, as they may be shipped; formats and families of models; the server as an outsider measures
# it. Packed checkpoints are made by the first step that needs them, and removed when none does any more. TINY=1 DEVICE=cpu tries all
# of it with few narrow layers on a CPU.
device=${DEVICE:-cuda}
models() { sed -E "s/([a-z][a-z0-9.-]*[0-9]b)/\\1${TINY:+-tiny}/g" <<< "$1"; }
tune="
import sys
from pathlib import Path
from bench.families import prepare
from trimtab.cli.main import main
sys.exit(main(['tune', str(prepare(sys.argv[1], Path('$work'))), '--device', '$device', '--rows', '8', '--export', sys.argv[2]]))
"
for one in e4b e2b qwen3-vl-4b; do step tune-$one 150 $py -c "$tune" "$(models $one)" "$out/tuned-$one.json"; done
step formats 560 $py -m bench.formats --work "$work" --again --tune --save "$out/formats.json" --total-s "{S}" --timeout-s 200 --cases "$(models \
  qwen3-8b:nf4-dq,qwen3-8b:q4_k_m,e4b:nf4-dq,e4b:mobile,e2b:mobile,qwen3-8b:ct-g128,qwen3-8b:awq,qwen3-8b:gptq,qwen3-8b:fp8,e4b:ct-g32)"
step families 560 $py -m bench.families --work "$work" --again --save "$out/families.json" --total-s "{S}" --models \
  "$(models qwen3.5-9b,qwen3-vl-4b,qwen3-8b,e4b,llama-3-8b,gemma3-4b)"
for card in 6 5; do  # what a smaller card leaves
  step families-$card 200 $py -m bench.families --work "$work" --again --save "$out/families.json" --total-s "{S}" --engines trimtab \
    --card-gib $card --models "$(models qwen3-8b,qwen3.5-9b)"
done
[ -e "$out/families.done" ] && [ -e "$out/families-5.done" ] && rm -rf "$work"/*-packed "$work"/*-packed-r8
step attention 90 $py -m bench.attention --save "$out/attention.json"
load() { # NAME SECONDS SIZE TOKENS CONTEXT FLAGS...: 8 adapters, 32 clients, answers of 128 tokens
  local name=$1 limit=$2 size=$3 tokens=$4 context=$5 clients=32 answer=128; shift 5
  [ -n "${TINY:-}" ] && tokens=24 clients=4 answer=8
  step "$name" "$limit" $py -m bench.load --work "$work" --size "$(models $size)" --device $device --quant nf4-dq --adapters 8 \
    --text-tokens $tokens --context $context --max-tokens $answer --clients $clients --rates --engines trimtab --seconds 20 --skip-s 10 \
    --save "$out/$name.json" "$@"
}
# The other script takes its model and adapters, which are gone with a machine.
[ -n "${OUTSIDER:-}" ] && [ ! -e "$out/outsider.done" ] && [ ! -e "$work/e4b-talking/tokenizer.json" ] && rm -f "$out/load-outside.done"
load load-outside 200 e4b 512 1024 --outside
load load-long 200 e4b 1300 2048 --outside
load load-qwen 240 qwen3-8b 512 1024 --outside
if [ -n "${OUTSIDER:-}" ]; then  # a load script of somebody else: OUTSIDER FOLDER SECONDS ROWS WORDS
  plan outsider
  mkdir -p "$work/outside"
  ln -sfn "$work/e4b-talking" "$work/outside/base"
  ln -sfn "$work/e4b-a0" "$work/outside/mm_adapter_inner"
  step outsider 200 env FLAGS="--quant nf4-dq --device cuda" CLIENTS=32 $py "$OUTSIDER" "$work/outside" 20 32 77
fi

plan make tests-new tests-kernels tests-steps tests-memory tests-rest
# 1. Checkpoints of random weights; tests beside it, and alone those that measure memory. What is newest comes first.
make_models="
import os, shutil, sys
from pathlib import Path
from bench import voices
from bench.cards import prepare
from bench.load import sized
from bench.prompts import give_eyes
work = Path('$work')
def linked(source, target):  # weights are shared, what is written anew is not
    return os.link(source, target) if source.endswith('.safetensors') else shutil.copy2(source, target)
for name in sys.argv[1:]:
    prepare(name, work)
    if name.startswith('e') and not (work / name / 'processor_config.json').exists():
        give_eyes(work / name)
    talking = work / f'{name}-talking'
    if name != 'e2b' and not (talking / 'tokenizer.json').exists():
        shutil.copytree(work / name, talking, copy_function=linked, dirs_exist_ok=True)
        voices.give(talking)
    if name != 'e2b':
        sized(name, work, 32 if name == '$size' else 8, device='cuda', context=1024, audio_s=5.0)
print('made:', *sys.argv[1:])
"
# In /dev/shm they are gone with the machine, whatever OUT says.
[ -e "$work/$size-talking/tokenizer.json" ] || rm -f "$out/make.done"
step make 200 $py -c "$make_models" "$size" e2b &
tests new 280 6 test_capturing.py test_kv8.py test_paged_rows.py test_batch_invariant.py test_tower_graphs.py test_graphs.py test_packed_prompts.py test_open_prompts.py test_prompt_room.py test_tower_ops.py test_last_layers.py test_chunk_layers.py
tests kernels 240 6 test_experts.py test_kernels.py test_ends.py test_head8.py test_short_ops.py test_many_rows.py test_prompt_kernels.py test_formats.py test_format_models.py &
tests steps 240 6 test_recurrent.py test_decoders.py test_prefill.py test_generate.py test_batch.py test_chat.py test_load.py test_known.py
wait
tests memory 90 1 test_memory.py test_devices.py test_attention.py

plan cards prompts prompts-4gib start
# 2. Small cards: every row of the table, after 200 mixed requests too, the stock stack beside them.
step cards 900 $py -m bench.cards --work "$work" --save "$out/cards.json" --missing --mixed --total-s "{S}" --cases \
  e4b:4:auto,e4b:3.7:auto,e4b:4:full,e4b:3.2:auto,e4b:6:full,e4b:0:full,e4b:3.8:auto,e4b:3.75:auto,e4b:3.5:auto,e2b:2.5:auto,e2b:2:auto,e2b:3:full,e2b:0:full,e4b:4:full:copies4,e4b:4:auto:copies4,e4b:0:full:enginestock,e2b:0:full:enginestock
# 3. Prompts, an image among them, beside the stock stack and on a small card.
step prompts 240 $py -m bench.prompts --work "$work" --models "$size,e2b" --save "$out/prompts.json"
step prompts-4gib 150 $py -m bench.prompts --work "$work" --models "$size" --engines trimtab --card-gib 4 --save "$out/prompts-4gib.json"
step start 170 $py -m bench.start --work "$work" --size "$size" --device cuda --gpu-memory 6GiB --runs 1 --save "$out/start.json"
plan company kv-pages kv8 turns load qwen cards-qwen
# 4. Batch-invariant answers, keys and values in pages, second turns of a chat.
step company 150 $py -m bench.company --work "$work" --size "$size" --rows 8 --save "$out/company.json"
step kv-pages 120 $py -m bench.kv_pages --work "$work" --model "$size" --rows 32 --context 4096 --tokens 512 --save "$out/kv_pages.json"
step kv8 150 $py -m bench.kv8 --work "$work" --model "$size" --rows 8 --context 4096 --save "$out/kv8.json"
step turns 90 $py -m bench.turns "$work/$size" --adapter "$work/$size-r8" --quant nf4-dq --device cuda --save "$out/turns.json"
# 5. Servers under load, stock and transformers serve among them: mixed requests, Poisson arrivals, 32 adapters on 32 rows.
step load 560 env PYTHON="$py" "$here/load_all.sh" "$work" "$out" "{S}"
# Qwen3-8B is made last: 16 GB.
step qwen 120 $py -c "$make_models" qwen3-8b
step cards-qwen 280 $py -m bench.cards --work "$work" --save "$out/cards.json" --missing --mixed --total-s "{S}" --cases qwen3-8b:5:auto,qwen3-8b:0:full:enginestock

# 6. A memory checker over every kernel, where there is one (NVIDIA's compute-sanitizer, from a toolkit or its wheel).
sanitizer=${SANITIZER:-$(command -v compute-sanitizer)}
if [ -n "$sanitizer" ]; then
  own=(); for name in native cub gemm cutlass nvjet; do own+=(--kernel-name-exclude "kns=$name"); done  # torch's kernels
  for tool in memcheck initcheck synccheck; do
    plan "sanitizer-$tool"
    step "sanitizer-$tool" 270 "$sanitizer" --tool $tool --error-exitcode 9 $py -m tests.gpu.once &
    plan "layers-$tool"
    step "layers-$tool" 270 "$sanitizer" --tool $tool --error-exitcode 9 $py -m tests.gpu.once layers &
  done
  plan layers-racecheck
  step layers-racecheck 270 "$sanitizer" --tool racecheck "${own[@]}" --error-exitcode 9 $py -m tests.gpu.once layers &
  for part in 1 2 3 4 5 6 7 8 9 10; do
    plan "racecheck-$part"
    step "racecheck-$part" 270 "$sanitizer" --tool racecheck "${own[@]}" --error-exitcode 9 $py -m tests.gpu.once $part 10 &
  done
  wait
fi

plan decode merge bridge bridge-old lanes matrix matrix-old bench-kernels
# 7. What was measured before and changes seldom.
tests rest 400 8 test_bridge.py test_verify.py test_merge.py test_matrix.py
step decode 600 $py -m bench.decode --work "$work" --models "$size" --timeout-s 200 --save "$out/decode.json"
# The bridge's cases hold nearly all of the card: only the merge, which uses little of it, runs meanwhile.
step merge 240 $py -m bench.merge --work "$TMPDIR/merge" --sizes "$size" --no-check --save "$out/merge.json" &
step bridge 120 $py -m bench.bridge --work "$work" --size "$size" --save "$out/bridge.json"
# With the oldest set of packages, in a folder of its own: its checkpoint is written by that release.
[ -n "${OLD_SITE:-}" ] && step bridge-old 260 env PYTHONPATH="$OLD_SITE:$PWD" $py -m bench.bridge --work "$work-old" --size "$size" \
  --save "$out/bridge.json"
wait
step lanes 180 $py -m bench.lanes --work "$work" --size "$size" --save "$out/lanes.json"
step matrix 560 $py -m bench.matrix --device cuda --jobs 10 --save "$out/matrix_gpu_newest.json"
[ -n "${OLD_SITE:-}" ] && step matrix-old 560 env PYTHONPATH="$OLD_SITE:$PWD" $py -m bench.matrix --device cuda --jobs 10 \
  --save "$out/matrix_gpu_oldest.json"
step bench-kernels 40 $py -m bench.kernels --models "$size" --rows 1,8 --json "$out/kernels.json"
# llama.cpp, where its sources are (LLAMA: a folder with `peer build SOURCES FOLDER`): minutes of compiling.
if [ -n "${LLAMA:-}" ]; then
  plan peer
  step peer 560 bash -c '{ [ -x "$3/peer" ] || bash "$1/peer" build "$1" "$3"; } && PEER=$3/peer exec "$0" -m bench.families \
    --again --work "$2" --save "$4" --models "$5" --engines llama.cpp' $py "$LLAMA" "$work" "$TMPDIR/peer" "$out/families.json" "$(models qwen3-8b)"
fi
exit 0
