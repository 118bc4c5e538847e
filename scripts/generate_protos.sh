#!/usr/bin/env bash
# Generates the Python code of protos/ and third_party/ into client/, or with --check says whether the committed code is current.
#
# The versions are old on purpose: code from this generator runs on protobuf 4.25 to 7 and grpcio 1.62 to 1.85, code
# from newer ones fails on versions of protobuf that engines pin. They live in an environment of their own because
# grpcio-tools and nixl crash when one process loads both.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONHOME PYTHONPATH

# setuptools: the last that has pkg_resources, which grpcio-tools 1.62 imports.
requirements=(grpcio-tools==1.62.3 mypy-protobuf==3.6.0 'setuptools<81')
package=client/kvferry/v1
# What kvferry says to etcd (docs/deployment.md).
etcd=client/kvferry/_directory/etcd_v3_pb2.py
venv=.venv-proto
stamp=$venv/.installed

if [[ "$(cat "$stamp" 2>/dev/null)" != "${requirements[*]}" ]]; then
    # grpcio-tools 1.62 has no wheels for Python 3.13 and later.
    python=
    for candidate in ${PROTO_PYTHON:-python3 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [[ -z $python ]]; then
        echo "Generating code needs Python 3.10, 3.11 or 3.12; name one with PROTO_PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "Setting up $venv for code generation"
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" install -qq --disable-pip-version-check "${requirements[@]}"
    echo "${requirements[*]}" >"$stamp"
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# protoc finds its plugins on PATH.
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc -Iprotos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
    protos/kvferry/v1/*.proto
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc -Ithird_party \
    --python_out="$out" --mypy_out=quiet:"$out" third_party/etcd/etcd_v3.proto

if [[ "${1:-}" == --check ]]; then
    if ! diff -ru --exclude=__init__.py --exclude=__pycache__ "$package" "$out/kvferry/v1"; then
        echo "The code in $package is not what protos/ generates: run 'make proto' and commit the result" >&2
        exit 1
    fi
    for made in "$etcd" "${etcd}i"; do
        if ! diff -u "$made" "$out/etcd/${made##*/}"; then
            echo "$made is not what third_party/ generates: run 'make proto' and commit the result" >&2
            exit 1
        fi
    done
    exit
fi

mkdir -p "$package"
rm -f "$package"/*_pb2.py "$package"/*_pb2.pyi "$package"/*_pb2_grpc.py "$package"/*_pb2_grpc.pyi
cp "$out"/kvferry/v1/* "$package"
if [[ ! -e $package/__init__.py ]]; then
    echo '"""The contract, generated from protos/kvferry/v1 by `make proto`."""' >"$package/__init__.py"
fi
cp "$out"/etcd/etcd_v3_pb2.py "$out"/etcd/etcd_v3_pb2.pyi "${etcd%/*}"
