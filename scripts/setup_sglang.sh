#!/usr/bin/env bash
# A real SGLang on CPU, kvferry and a real vLLM beside it, in a virtual environment: 5 GB, some minutes. Used by
# `make test-sglang`. Arguments: the versions of SGLang and vLLM, and the folder.
set -euo pipefail
cd "$(dirname "$0")/.."

SGLANG=${1:?the version of SGLang}
VLLM=${2:?the version of vLLM}
venv=${3:?the folder of the virtual environment}

# SGLang calls vLLM's kernels where it has none of its own, and asks for nearly the same packages. Besides, tests let
# one read from the other.
scripts/setup_vllm.sh "$VLLM" "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# SGLang asks for another torch, and for kernels that exist for CUDA only. So it is installed without what it asks for;
# what it imports beyond vLLM's packages is named here.
pip install -c "$venv/constraints.txt" gguf ipython orjson soundfile
pip install --no-deps "sglang==$SGLANG" sglang-router==0.3.2 torchvision
# torchvision's operators exist for CUDA's torch only, and its Python part does not start without them. Text needs none.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: > "$site/torchvision/_meta_registrations.py"
"$venv/bin/python" -W ignore -c 'import sglang.srt.managers.scheduler; print("sglang", sglang.__version__)'
