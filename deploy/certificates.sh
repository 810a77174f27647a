#!/usr/bin/env bash
# deploy/certificates.sh DIR HOST...    e.g.  deploy/certificates.sh pki fleet.example.org 10.0.0.5
# Makes DIR/ca.crt and ca.key (once, kept afterwards) and DIR/server.pem and server.key (anew) for a
# SuperLink that its SuperNodes reach under the given names or addresses. ca.crt goes to every device;
# ca.key goes nowhere.
set -euo pipefail
umask 077
[ $# -ge 2 ] || { sed -n 2,5p "$0" >&2; exit 2; }
dir=$1; shift
mkdir -p "$dir"

names=""
for host in "$@"; do
    if [[ $host == *:* || $host != *[!0-9.]* ]]; then kind=IP; else kind=DNS; fi
    names+=${names:+,}$kind:$host
done

key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [ ! -e "$dir/ca.key" ]; then
    openssl req -x509 "${key[@]}" -days 3650 -subj "/CN=fedsparse CA" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout "$dir/ca.key" -out "$dir/ca.crt" 2>/dev/null
fi
openssl req "${key[@]}" -subj "/CN=$1" -keyout "$dir/server.key" -out "$dir/server.csr" 2>/dev/null
openssl x509 -req -in "$dir/server.csr" -days 825 -CA "$dir/ca.crt" -CAkey "$dir/ca.key" \
    -set_serial "0x$(openssl rand -hex 16)" -out "$dir/server.pem" -extfile <(
        echo "subjectAltName=$names"
        echo "basicConstraints=CA:FALSE"
        echo "keyUsage=digitalSignature"
        echo "extendedKeyUsage=serverAuth"
        echo "subjectKeyIdentifier=hash"
        echo "authorityKeyIdentifier=keyid"
    ) 2>/dev/null
rm "$dir/server.csr"
chmod 644 "$dir/ca.crt" "$dir/server.pem"
openssl verify -CAfile "$dir/ca.crt" "$dir/server.pem" >/dev/null
echo "$dir: server.pem for $names"
