#!/usr/bin/env bash
# Generates kvferry's client for Rust, and builds the example with it, from Debian's packages: build.sh FOLDER
#
# They are: cargo protobuf-compiler librust-prost-build-dev librust-prost-types-dev librust-h2-dev librust-tokio-dev
# With crates.io: `cargo build` in this folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1/.cargo"
cp -r "$root"/examples/rust/{Cargo.toml,build.rs,src} "$1"
cd "$1"
cat > .cargo/config.toml <<'END'
[source.crates-io]
replace-with = "debian"
[source.debian]
directory = "/usr/share/cargo/registry"
END
KVFERRY_PROTOS=$root/protos CARGO_TARGET_DIR=$PWD/target cargo build --offline --quiet
