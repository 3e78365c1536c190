#!/bin/sh
# For a Redis over TLS: an authority of your own, and a certificate of it for the server.
#
#   ./certificates.sh HOST...    the names and addresses that rediss:// URLs may have
#
# Writes into this folder: ca.pem, which every node of the fleet needs; server.pem and server.key, for redis-server;
# ca.key, which nobody needs until the next certificate, and which is best kept elsewhere. With a ca.key that is there
# already it makes another certificate of the same authority: nothing changes on the nodes.
set -eu
[ $# -gt 0 ] || { echo "usage: $0 HOST..." >&2; exit 2; }
umask 077

ALGORITHM="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
names=
for host in "$@"; do
  case $host in
    *:* | *[0-9].[0-9]*.*[0-9]) kind=IP ;;
    *) kind=DNS ;;
  esac
  case $host in *[!0-9A-Za-z.:*-]* | '') echo "$0: $host is no host" >&2; exit 2 ;; esac
  names=$names${names:+,}$kind:$host
done

settings=$(mktemp)
trap 'rm -f "$settings" server.csr' EXIT
cat >"$settings" <<END
[req]
distinguished_name = subject
[subject]
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $names
END

if [ ! -e ca.key ]; then
  # shellcheck disable=SC2086  the words of one variable
  openssl req -x509 $ALGORITHM -sha256 -days 3650 -subj "/CN=authority of Motley's Redis" \
    -config "$settings" -extensions authority -keyout ca.key -out ca.pem
fi
# shellcheck disable=SC2086
openssl req -new $ALGORITHM -subj "/CN=$1" -config "$settings" -keyout server.key -out server.csr
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -sha256 -days 825 \
  -extfile "$settings" -extensions server -out server.pem
chmod 644 ca.pem server.pem
