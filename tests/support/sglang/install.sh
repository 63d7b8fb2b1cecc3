#!/usr/bin/env bash
# Builds a virtual environment with an unmodified SGLang that serves on any CPU, and this project's plugin in it.
#   install.sh VENV PYTHON [torch requirement] [pip arguments for torch …]
# torch is named in every step that might replace it: no step may bring a build for GPUs.
set -euo pipefail
venv=$1 python=$2 torch=${3:-torch==2.13.0}
shift $(( $# < 3 ? $# : 3 ))
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q "$@" "$torch"
pip install -q --no-deps sglang==0.5.23
pip install -q -r "$here/requirements.txt" "$torch"
pip install -q --no-deps triton torchvision==0.28.0
pip install -q xgrammar==0.2.7 mistral_common "$torch"
pip install -q --no-deps "$here/cpu_platform" "$here/torchvision_stub"
pip install -q --no-deps -e "$root"
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
  echo "a step replaced the CPU build of torch; set TORCH or TORCH_ARGS to a CPU build" >&2
  exit 1
fi
