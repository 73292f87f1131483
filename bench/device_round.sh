#!/usr/bin/env bash
# The measurements that wait for a GPU, in calls of at most ten minutes: `bash bench/device_round.sh FOLDER [SECONDS]`.
# FOLDER gets round.tgz (all results, logs and which steps are done) and steps.txt. A later call, on a bare machine too, goes on where
# this one ended if `.gpu/round.tgz` is that file (CARRIED: another folder than `.gpu`). That folder also has the wheels
# (tools/gpu_setup.sh), and what is optional: llama.cpp's sources in `llama`, another load script as `outsider.py`. The steps are in
# tools/gpu_all.sh (STEPS: some of them); its table is printed last. TINY=1 DEVICE=cpu: a trial on a CPU.
folder=${1:?usage: bench/device_round.sh FOLDER [SECONDS]}; seconds=${2:-560}; carried=${CARRIED:-.gpu}; begun=$(date +%s)
cd "$(dirname "$0")/.." || exit 2
state=${TMPDIR:-/tmp}/device-round
mkdir -p "$state" "$folder"
[ -e "$carried/round.tgz" ] && [ ! -e "$state/steps.txt" ] && tar xzf "$carried/round.tgz" --no-same-owner -C "$state"
export XDG_CACHE_HOME=$state/cache  # of launch configurations that were tuned; the rest of it is made again
compgen -G "$carried/*.whl" > /dev/null && . tools/gpu_setup.sh "$carried"
${PYTHON:-python3} -c "import bench.families, bench.load, peft, pytest, trimtab.cli.main, trimtab.serve.http.app" || exit 2  # what lacks, before minutes are spent
[ -e "$carried/outsider.py" ] && export OUTSIDER=$carried/outsider.py
[ -d "$carried/llama" ] && export LLAMA=$carried/llama
STEPS=${STEPS:-round} bash tools/gpu_all.sh "$state" $((seconds - 15 - ($(date +%s) - begun)))
tar czf "$folder/round.tgz" --exclude="./cache/trimtab/[!t]*" -C "$state" .
cp "$state/steps.txt" "$folder/"
