#!/usr/bin/env bash
# Sets up .venv and runs the tests. Arguments go to pytest (paths are relative to the repository):
#
#   launch/test.sh
#   launch/test.sh tests/unit -k layout
#
# Some tests fill a small file system of their own, or make one read-only. That takes the right to mount: who
# is not root gets it in a user namespace.

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test,dev,demo

cd "$KRUL_ROOT"
inside=()
if [[ $(id -u) != 0 ]]; then
    inside=(unshare --user --map-root-user --mount)
    if ! "${inside[@]}" true 2>/dev/null; then
        echo "test.sh: no user namespaces here (unshare failed): the tests that mount a file system will fail." >&2
        echo "test.sh: run this as root, or allow them: sudo sysctl -w kernel.unprivileged_userns_clone=1" >&2
        inside=()
    fi
fi
exec ${inside[@]+"${inside[@]}"} "$KRUL_PYTHON" -m pytest "$@"
