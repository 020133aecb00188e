#!/usr/bin/env bash
# Debian packages that some tests need. Installed where nobody has to be asked; without them those tests are skipped,
# and say so.
set -euo pipefail
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v ip >/dev/null || missing+=(iproute2)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  printf '[test] installing %s ...\n' "${missing[*]}"
  log=$(mktemp)
  { apt-get install -y -qq "${missing[@]}" || { apt-get update -qq && apt-get install -y -qq "${missing[@]}"; }; } \
    >"$log" 2>&1 || printf '[test] %s could not be installed (%s); their tests are skipped\n' "${missing[*]}" "$log"
else
  printf '[test] not found: %s; their tests are skipped\n' "${missing[*]}"
fi
