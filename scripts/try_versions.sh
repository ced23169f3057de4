#!/usr/bin/env bash
# Tries longctx with the oldest or the newest packages that pyproject.toml takes:
#
#   scripts/try_versions.sh lowest          # of its own requirements the lower bounds
#   scripts/try_versions.sh highest         # the newest within the bounds
#
# It makes a virtual environment in a temporary folder, builds a wheel, installs it with uv, imports every module
# and trains a patched model outside the repository (tests/installed.py), then runs the tests of
# plan, lora, memory and model, or those that are named after the first argument.
#
# torch is held to one version in TORCH (default 2.13.0), because a new torch brings gigabytes of
# CUDA: with FIND_LINKS a folder of wheels can hold a build for the CPU. The lower bound of torch is
# what the GPU machines of profiling/results have.
set -euo pipefail
resolution=${1:?lowest or highest}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
case $resolution in
  lowest) resolution=lowest-direct ;;
  highest) ;;
  *) echo "error: $resolution: lowest or highest" >&2 && exit 1 ;;
esac
command -v uv >/dev/null || { echo "error: this needs uv: pip install uv" >&2 && exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv="$work/venv"
uv venv -q "$venv"
echo "torch==${TORCH:-2.13.0}" >"$venv/constraints.txt"
links=(${FIND_LINKS:+--find-links "$FIND_LINKS"})
uv build -q --wheel -o "$work/wheel" "$root"
wheel=$(echo "$work"/wheel/*.whl)
uv pip install -q --python "$venv/bin/python" --resolution "$resolution" "${links[@]}" \
  -c "$venv/constraints.txt" "longctx-train[lora,test] @ file://$wheel"
uv pip freeze --python "$venv/bin/python"
(cd "$venv" && bin/python "$root/tests/installed.py" >/dev/null)
echo "imported, and trained a patched model outside the repository"
cd "$root"
[ $# -gt 0 ] || set -- tests/train/plan tests/train/lora tests/memory tests/model
"$venv/bin/python" -m pytest -p no:cacheprovider "$@"
