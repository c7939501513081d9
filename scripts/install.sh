#!/bin/bash
# Installs or removes the files of packaging/files.
#
#   [DESTDIR=...] [LIBDIR=lib] scripts/install.sh install|uninstall PREFIX [PACKAGE]
#
# The programs must be built: `make install` does that. BUILD names another folder with them than
# the one of cargo's release profile. With PACKAGE, only the files of this package are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in install | uninstall) action=$1 ;; *) sed -n '2,8s/^# \?//p' "$0" >&2; exit 2 ;; esac
prefix=${2:?a prefix, such as /usr/local}
package=${3:-}
to=${DESTDIR:-}$prefix
build=${BUILD:-${CARGO_TARGET_DIR:-target}/release}
libdir=${LIBDIR:-lib}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
# zsh of a distribution has a folder of its own for the completions of packages.
zsh=share/zsh/site-functions
[ "$prefix" != /usr ] || zsh=share/zsh/vendor-completions
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# The manual and the completions, by the programs that they describe.
make_files() {
  "$build/udm" man --folder "$made/man"
  "$build/udm" completions bash > "$made/udm.bash"
  "$build/udm" completions zsh > "$made/_udm"
  "$build/udm" completions fish > "$made/udm.fish"
  "$build/udm-bench" man > "$made/udm-bench.1"
  awk -v version="$version" -v name='tables and configuration files of udm' \
    -f packaging/man/from-markdown.awk docs/configuration.md docs/tables.md > "$made/udm.5"
  local listed
  listed=$(awk '$3 ~ "^@made@/man/" { sub(".*/", "", $3); print $3 }' packaging/files | sort)
  [ "$(cd "$made/man" && printf '%s\n' * | sort)" = "$listed" ] || {
    echo "install: packaging/files does not list the pages of all commands:" >&2
    diff <(echo "$listed") <(cd "$made/man" && printf '%s\n' * | sort) >&2
    exit 1
  }
}

# Text in which a prefix or a version is filled in.
edit() {
  sed -e "s|@PREFIX@|$prefix|g" -e "s|@LIBDIR@|$libdir|g" -e "s|@VERSION@|$version|g" \
    -e "s|/usr/bin/|$prefix/bin/|g" "$1"
}

install_file() {
  local mode=$1 source=$2 file=$3
  case $mode in
    link)
      install -d "${file%/*}"
      ln -sfn "$source" "$file"
      ;;
    edit)
      edit "$source" > "$made/edited"
      install -D -m 644 "$made/edited" "$file"
      ;;
    *) install -D -m "$mode" "$source" "$file" ;;
  esac
}

[ "$action" = uninstall ] || make_files
count=0
while read -r owner mode source destination; do
  case $owner in '' | '#'*) continue ;; esac
  [ -z "$package" ] || [ "$package" = "$owner" ] || continue
  source=${source/@build@/$build} source=${source/@made@/$made} source=${source/@version@/$version}
  destination=${destination/@lib@/$libdir} destination=${destination/@version@/$version}
  destination=${destination/@zsh@/$zsh}
  if [ "$action" = install ]; then
    install_file "$mode" "$source" "$to/$destination"
  else
    rm -f "$to/$destination"
  fi
  count=$((count + 1))
done < packaging/files
[ "$count" -gt 0 ] || { echo "install: packaging/files has no package $package" >&2; exit 1; }
if [ "$action" = uninstall ] && [ -d "$to/share/doc/udm" ]; then
  find "$to/share/doc/udm" -depth -type d -empty -delete
fi
# The loader finds a new library in its folders only after ldconfig.
if [ -z "${DESTDIR:-}" ] && [ "$(id -u)" -eq 0 ]; then
  ldconfig 2> /dev/null || true
  # The directories of udm, and the units as they are now.
  if [ "$action" = install ]; then
    systemd-tmpfiles --create "$to/lib/tmpfiles.d/udm.conf" 2> /dev/null || true
  fi
  [ ! -d /run/systemd/system ] || systemctl daemon-reload 2> /dev/null || true
fi
case $action in
  install) echo "udm $version is in $to" ;;
  uninstall) echo "udm is removed from $to; /etc/udm, /run/udm and /var/lib/udm are unchanged" ;;
esac
