#!/bin/sh
# Installs clang 19 and its development files on Debian or Ubuntu, where they are missing.
set -e
missing=""
command -v clang++-19 >/dev/null 2>&1 || missing="clang-19"
[ -f /usr/lib/llvm-19/include/clang/Sema/Sema.h ] || missing="$missing libclang-19-dev"
[ -f /usr/lib/llvm-19/include/llvm/IR/IRBuilder.h ] || missing="$missing llvm-19-dev"
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
  echo "metal host: install clang 19 with its LLVM and clang development files (missing: $missing)" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
