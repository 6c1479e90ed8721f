#!/usr/bin/env bash
# Sets up .venv and shows what sgl-krul does: a chat is paused, its server killed and started again, and the chat goes on.
#
#   launch/demo.sh            about two minutes; the first time it also installs and converts a small model
#
# Arguments go to `krul demo`.

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo

exec "$KRUL_PYTHON" -m sgl_krul.cli demo "$@"
