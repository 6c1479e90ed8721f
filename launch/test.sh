#!/usr/bin/env bash
# Sets up .venv and runs the tests. Arguments go to pytest (paths are relative to the repository):
#
#   launch/test.sh
#   launch/test.sh tests/unit -k layout

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test,dev,demo

cd "$KRUL_ROOT"
exec "$KRUL_PYTHON" -m pytest "$@"
