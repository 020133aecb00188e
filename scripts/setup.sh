#!/usr/bin/env bash
# Makes .venv with everything pinned. Run by `make`; safe to run again after a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }
step() { printf '[setup] %s ...\n' "$1"; }

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "the pinned CPU stack is for Linux on x86-64, this is $(uname -s) on $(uname -m); use a Linux machine or container"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
  || fail "$PYTHON is $("$PYTHON" --version 2>&1), the lock file is for Python 3.11; run: make PYTHON=/path/to/python3.11"
command -v g++ >/dev/null || fail "g++ was not found (DeepSpeed compiles a small extension); install it, e.g. apt-get install g++"

quiet() { "$@" >.venv/setup.log 2>&1 || { tail -n 20 .venv/setup.log >&2; fail "'$*' failed; the whole log is .venv/setup.log"; }; }

step "virtual environment .venv"
"$PYTHON" -m venv .venv
step "torch (CPU build, 190 MB)"
.venv/bin/python -m pip install -q --disable-pip-version-check --no-compile "$TORCH" >.venv/setup.log 2>&1 \
  || quiet .venv/bin/python -m pip install -q --disable-pip-version-check --no-compile "$TORCH" --index-url "$TORCH_INDEX"
step "ray, vllm, deepspeed and their dependencies (pinned by hash, 1-4 minutes)"
quiet .venv/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements/cpu.lock
step "bytecode (on all cores; pip would use one)"
# Packages ship a few files that are for other versions of Python: these do not compile, and are never imported.
.venv/bin/python -m compileall -q -j 0 .venv/lib >.venv/compile.log 2>&1 || true
step "echo_planes"
rm -rf echo_planes.egg-info  # an old one in the checkout would be believed before the new one
quiet .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
step "codecs (compiled once)"
quiet .venv/bin/python -m echo_planes.weights.codec.warm_up
printf '[setup] done\n'
