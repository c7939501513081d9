#!/bin/bash
# Makes certificates for NBD over TLS: an authority, a server, a client.
#
#   scripts/certificates.sh FOLDER [NAME...]
#
# NAME is a host name or an address by which clients call the server (default: localhost,
# 127.0.0.1, ::1). FOLDER gets ca-cert.pem, server-cert.pem, server-key.pem, client-cert.pem and
# client-key.pem, the names that udm, nbdkit, libnbd and QEMU know, and ca-key.pem, which belongs on
# neither machine. A file that exists is kept: run it again for a second client after moving the
# first one's two files away. Valid for two years.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,12s/^# \?//p' "$0"; exit 1; }
command -v openssl > /dev/null || { echo "openssl is missing: apt-get install openssl" >&2; exit 1; }
folder=$1
shift
[ $# -gt 0 ] || set -- localhost 127.0.0.1 ::1
umask 077
mkdir -p "$folder"
cd "$folder"

names=
for name in "$@"; do
  case "$name" in
    *[!0-9.]*) [[ "$name" == *:* ]] && names+=",IP:$name" || names+=",DNS:$name" ;;
    *) names+=",IP:$name" ;;
  esac
done

# issue WHO USAGE EXTENSIONS...
issue() {
  local who=$1
  shift
  [ -e "$who-cert.pem" ] && return
  local signer=(-CA ca-cert.pem -CAkey ca-key.pem)
  [ "$who" = ca ] && signer=()
  local extensions=()
  for extension in "$@"; do extensions+=(-addext "$extension"); done
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 730 \
    -subj "/CN=udm $who" "${signer[@]}" "${extensions[@]}" \
    -keyout "$who-key.pem" -out "$who-cert.pem" 2> /dev/null
  echo "$folder/$who-cert.pem"
}
issue ca "keyUsage=critical,keyCertSign,cRLSign"
issue server "basicConstraints=critical,CA:FALSE" "extendedKeyUsage=serverAuth" \
  "subjectAltName=${names#,}"
issue client "basicConstraints=critical,CA:FALSE" "extendedKeyUsage=clientAuth"
