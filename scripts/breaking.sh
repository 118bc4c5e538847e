#!/usr/bin/env bash
# Checks that the protos still serve callers that were built from those of the last release. With --release it keeps the
# protos of today as those of the release that pyproject.toml names.
#
# The releases are kept as descriptors in protos/released/, because a clone for CI may have no tags.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=${BUF:-tests/support/nodejs/node_modules/.bin/buf}

if [[ "${1:-}" == --release ]]; then
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
    exec "$buf" build --exclude-source-info --as-file-descriptor-set -o "protos/released/$version.binpb"
fi

last=$(printf '%s\n' protos/released/*.binpb | sort -V | tail -n 1)
if ! "$buf" breaking --against "$last"; then
    echo "The protos break callers of the release in $last: add fields and calls, and leave what there is" >&2
    exit 1
fi
