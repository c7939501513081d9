#!/bin/bash
# Puts the program, the library for C, its header and its manual into a prefix.
#
#   DESTDIR=... scripts/install.sh PREFIX
#
# They must be built: `make install` does that.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$1
to=${DESTDIR:-}$prefix
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)

install -D -m 755 target/release/udm "$to/bin/udm"
install -D -m 755 target/release/udm-bench "$to/bin/udm-bench"
install -D -m 755 target/release/libudm_capi.so "$to/lib/libudm.so.$version"
ln -sf "libudm.so.$version" "$to/lib/libudm.so.0"
ln -sf libudm.so.0 "$to/lib/libudm.so"
install -D -m 644 target/release/libudm_capi.a "$to/lib/libudm.a"
install -D -m 644 crates/capi/include/udm.h "$to/include/udm.h"
install -D -m 644 crates/capi/man/libudm.3 "$to/share/man/man3/libudm.3"
install -d "$to/lib/pkgconfig"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" crates/capi/udm.pc.in \
  > "$to/lib/pkgconfig/udm.pc"
chmod 644 "$to/lib/pkgconfig/udm.pc"
# A prefix that the loader looks into finds a new library only then.
if [ -z "${DESTDIR:-}" ] && [ "$(id -u)" -eq 0 ]; then ldconfig 2> /dev/null || true; fi
echo "udm $version is in $to"
