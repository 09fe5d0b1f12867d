#!/usr/bin/env bash
# Stands for the environment's Python in tests of launch.sh (ACCERL_PYTHON): fakes what would start a run, notes what it was asked.
# Its folder holds `code` (exit code of the run) and gets `calls`; the run folder is in it.
here=$STUB_DIR
printf '%s\n' "$*" >>"$here/calls"
case $2 in
    accerl_mp.launcher.prepare)
        [ -e "$here/refuse" ] && exit 2
        [ -e "$here/slow" ] && exec sleep 60
        mkdir -p "$here/run dir"
        printf "RUN_DIR='%s'\nNPROC=3\nRDZV_ENDPOINT=127.0.0.1:0\n" "$here/run dir" >"$4"
        ;;
    accerl_mp.launcher.torchrun)
        echo "$$" >"$here/torchrun.pid"
        if [ -e "$here/saves" ]; then # another process of its group: torchrun, which must not be told too
            (trap 'echo GROUP >>"$here/calls"; exit' TERM; while [ ! -e "$here/over" ]; do sleep 0.05; done) &
        fi
        trap 'echo TERM >>"$here/calls"; if [ -e "$here/saves" ]; then sleep 1; touch "$here/over"; exit 0; fi; exit 1' TERM
        while [ ! -e "$here/end" ]; do
            if [ -e "$here/run dir/stop" ] && [ ! -e "$here/deaf" ]; then exit 0; fi
            sleep 0.05
        done
        exit "$(cat "$here/code")"
        ;;
esac
