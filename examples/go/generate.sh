#!/usr/bin/env bash
# Generates kvferry's client for Go, and builds the example with it: generate.sh FOLDER
#
# With Debian's packages: golang-go protobuf-compiler protoc-gen-go protoc-gen-go-grpc golang-google-grpc-dev, and
# golang-github-golang-protobuf-1-5-dev, since code from protoc-gen-go does not run with the older 1.3.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "$1/src/kvferry/example" && cd "$1" && pwd)

protoc -I"$root/protos" --go_out="$out/src" --go-grpc_out="$out/src" "$root"/protos/kvferry/v1/*.proto
cp "$root/examples/go/main.go" "$out/src/kvferry/example"
cd "$out"
# Debian keeps libraries as source in a GOPATH. With modules: `go mod init kvferry && go mod tidy` in src/kvferry instead.
GO111MODULE=off GOPATH="$out:/usr/share/gocode" GOFLAGS= GOCACHE="$out/cache" go build -o "$out/example" kvferry/example
