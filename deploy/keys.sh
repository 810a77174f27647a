#!/usr/bin/env bash
# deploy/keys.sh DIR NAME...    e.g.  deploy/keys.sh keys camera-1 camera-2
# Makes DIR/NAME (private, for the device alone) and DIR/NAME.pub (to be registered with the
# SuperLink) for each name. A key that is there is kept: Flower knows a SuperNode by its key.
set -euo pipefail
umask 077
[ $# -ge 2 ] || { sed -n 2,4p "$0" >&2; exit 2; }
dir=$1; shift
mkdir -p "$dir"
for name in "$@"; do
    [ -e "$dir/$name" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$dir/$name"
    echo "$dir/$name.pub"
done
