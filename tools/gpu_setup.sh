#!/usr/bin/env bash
# Unpack the wheels carried to an offline GPU machine: `. tools/gpu_setup.sh .gpu` puts them and this tree on PYTHONPATH.
unset PYTHONDONTWRITEBYTECODE
site=${TMPDIR:-/tmp}/trimtab-site
if [ ! -d "$site" ]; then
  mkdir -p "$site"
  for wheel in "$1"/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
  python3 -m compileall -q -j 0 "$site" trimtab bench  # as pip does when it installs them
fi
# A wheel unpacked so has no executable files: compute-sanitizer and what it starts.
sanitizer=$(find "$site" -name compute-sanitizer -type f -print -quit)
if [ -n "$sanitizer" ]; then chmod -R u+x "$(dirname "$sanitizer")"; export SANITIZER=$sanitizer; fi
export PYTHONPATH="$site:$PWD" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
