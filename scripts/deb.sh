#!/bin/bash
# Builds the Debian packages udm, libudm0, libudm-dev and udm-bench, and checks them with lintian if
# it is installed: `make deb`.
#
# The packages are reproducible: times are those of the last commit (or SOURCE_DATE_EPOCH), and no
# folder of this machine is in them. DEB_REVISION is the revision of the package (1).
# DEBFULLNAME and DEBEMAIL name the maintainer. The packages are in TARGET/deb, where TARGET is
# cargo's folder.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
cargo=${CARGO:-cargo}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
out=$target/deb
stage=$out/stage
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH=$epoch
upstream=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
version=$upstream-${DEB_REVISION:-1}
maintainer="${DEBFULLNAME:-udm authors} <${DEBEMAIL:-udm@packages.invalid}>"
arch=$(dpkg --print-architecture)
triplet=$(dpkg-architecture -q DEB_HOST_MULTIARCH 2> /dev/null || cc -print-multiarch)
export LC_ALL=C

# Programs without the folders of this machine. They have a target folder of their own, because
# cargo builds all crates again when flags change.
build_programs() {
  local home=${CARGO_HOME:-$HOME/.cargo} flags=${RUSTFLAGS:-}
  flags+=" --remap-path-prefix=$home=/cargo --remap-path-prefix=$root=/udm"
  flags+=" --remap-path-prefix=$(rustc --print sysroot)=/rust"
  flags+=" --remap-path-prefix=$target=/target"
  RUSTFLAGS=$flags CARGO_TARGET_DIR=$target/package \
    $cargo build --release --locked -p udm-cli -p udm-bench -p udm-capi
}

# The crates in the programs, with their licences. Equal texts are printed once.
crates() {
  local name licence manifest file sum
  local -A printed=()
  $cargo metadata --locked --format-version 1 --filter-platform "$(rustc -vV | sed -n 's/^host: //p')" |
    jq -r '.packages[] | select(.source) | "\(.name) v\(.version)\t\(.license)\t\(.manifest_path)"' |
    sort > "$out/known"
  $cargo tree --locked --edges normal --prefix none --format '{p}' \
    -p udm-cli -p udm-bench -p udm-capi | cut -d' ' -f1,2 | sort -u > "$out/linked"
  echo "Crates of other authors in the programs and libraries of udm, with their licences."
  while IFS=$'\t' read -r name licence manifest; do
    grep -qxF "$name" "$out/linked" || continue
    printf '\n\n== %s: %s\n' "$name" "$licence"
    for file in "${manifest%/*}"/{LICEN[CS]E,COPYING,COPYRIGHT,NOTICE}*; do
      [ -f "$file" ] || continue
      sum=$(sha256sum < "$file")
      if [ -n "${printed[$sum]:-}" ]; then
        printf '\n-- %s: as of %s\n' "${file##*/}" "${printed[$sum]}"
      else
        printed[$sum]="$name, ${file##*/}"
        printf '\n-- %s:\n' "${file##*/}"
        tr -d '\r' < "$file"
      fi
    done
  done < "$out/known"
}

changelog() {
  printf 'udm (%s) unstable; urgency=medium\n\n' "$version"
  printf '  * Release %s of udm: changelog.gz lists the changes.\n\n' "$upstream"
  printf ' -- %s  %s\n' "$maintainer" "$(date -u -R -d "@$epoch")"
}

# A field of a paragraph of packaging/debian/control, with the lines that continue it.
field() {
  awk -v RS= -v package="$1" '$0 ~ "^Package: " package "\n"' packaging/debian/control |
    awk -v name="$2" '/^[^ ]/ { on = index($0, name ": ") == 1; if (on) sub("^" name ": ", "") } on'
}

# The packages that the programs and libraries of a staged package need.
shared_libraries() {
  local folder=$1 files=() found
  mapfile -t files < <(find "$folder" -type f \( -path '*/bin/*' -o -name '*.so.*' \))
  [ ${#files[@]} -gt 0 ] || return 0
  if command -v dpkg-shlibdeps > /dev/null; then
    mkdir -p "$out/source/debian"
    cp packaging/debian/control "$out/source/debian/control"
    found=$(cd "$out/source" && dpkg-shlibdeps -O "${files[@]}")
    echo "${found#shlibs:Depends=}"
  else
    echo "libc6, libgcc-s1"
  fi
}

stripped() {
  local file
  while read -r file; do strip --strip-unneeded -R .comment -R .note "$file"; done \
    < <(find "$1" -type f \( -path '*/bin/udm' -o -name '*.so.*' \))
  # udm-bench names functions in its flamegraphs.
  while read -r file; do strip --strip-debug --enable-deterministic-archives "$file"; done \
    < <(find "$1" -type f \( -path '*/bin/udm-bench' -o -name '*.a' \))
}

documents() {
  local package=$1 to=$2/usr/share/doc/$1
  if [ "$package" = libudm-dev ]; then
    mkdir -p "${to%/*}"
    ln -s libudm0 "$to"
    return
  fi
  mkdir -p "$to"
  install -m 644 packaging/debian/copyright "$to/copyright"
  install -m 644 CHANGELOG.md "$to/changelog"
  changelog > "$to/changelog.Debian"
  cp "$out/CRATES" "$to/CRATES"
  gzip -9n "$to/changelog" "$to/changelog.Debian" "$to/CRATES"
}

control_files() {
  local package=$1 folder=$2 script
  local control=$folder/DEBIAN
  mkdir -p "$control"
  for script in preinst postinst prerm postrm; do
    [ ! -e "packaging/debian/$package.$script" ] ||
      install -m 755 "packaging/debian/$package.$script" "$control/$script"
  done
  if [ "$package" = libudm0 ]; then
    echo "libudm 0 libudm0 (>= $upstream)" > "$control/shlibs"
    echo "activate-noawait ldconfig" > "$control/triggers"
  fi
  (cd "$folder" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum) \
    > "$control/md5sums"
  {
    echo "Package: $package"
    [ "$package" = udm ] || echo "Source: udm"
    echo "Version: $version"
    echo "Architecture: $arch"
    echo "Maintainer: $maintainer"
    echo "Installed-Size: $(du -sk --apparent-size --exclude=DEBIAN "$folder" | cut -f1)"
    fields "$package" "$(shared_libraries "$folder")"
  } > "$control/control"
  chmod 644 "$control"/{control,md5sums}
}

# The other fields of a package; empty ones are left out.
fields() {
  local package=$1 libraries=$2 name value
  for name in Multi-Arch Depends Suggests Section; do
    value=$(field "$package" "$name")
    value=${value//'${shlibs:Depends}'/$libraries}
    value=${value//'${binary:Version}'/$version}
    value=${value%, }
    [ -z "$value" ] || echo "$name: $value"
  done
  echo "Priority: optional"
  echo "Description: $(field "$package" Description)"
}

pack() {
  local package=$1 folder=$stage/$1
  DESTDIR=$folder LIBDIR=lib/$triplet BUILD=$target/package/release \
    scripts/install.sh install /usr "$package" > /dev/null
  find "$folder" -path '*/share/man/*' -type f -exec gzip -9n {} +
  stripped "$folder"
  documents "$package" "$folder"
  if [ -e "packaging/debian/$package.lintian-overrides" ]; then
    install -D -m 644 "packaging/debian/$package.lintian-overrides" \
      "$folder/usr/share/lintian/overrides/$package"
  fi
  control_files "$package" "$folder"
  local place
  for place in "$root" "$target" "${CARGO_HOME:-$HOME/.cargo}"; do
    # A folder such as /src or /udm is a part of other paths, too.
    [[ ${place#/} == */* ]] || { echo "NOTE: not searched for in the files: $place" >&2; continue; }
    if grep -rlaF -e "$place/" "$folder"; then
      echo "deb: these files of $package name the folder $place of this machine" >&2
      exit 1
    fi
  done
  find "$folder" -exec touch --no-dereference --date="@$epoch" {} +
  dpkg-deb --root-owner-group -Zxz --build "$folder" "$out/${package}_${version}_$arch.deb" > /dev/null
  echo "$out/${package}_${version}_$arch.deb"
}

for tool in jq git strip objdump dpkg-deb dpkg-shlibdeps; do
  command -v "$tool" > /dev/null || {
    echo "deb: $tool is missing: apt-get install jq git binutils dpkg-dev" >&2
    exit 1
  }
done
umask 022
build_programs
rm -rf "$stage" "$out/source"
mkdir -p "$out"
crates > "$out/CRATES"
for package in udm libudm0 libudm-dev udm-bench; do pack "$package"; done
rm -rf "$stage" "$out/source" "$out/CRATES" "$out/known" "$out/linked"
if command -v lintian > /dev/null; then
  lintian --fail-on error,warning --allow-root "$out"/*_"${version}_$arch".deb
else
  echo "NOTE: the packages were not checked: lintian is not installed" >&2
fi
