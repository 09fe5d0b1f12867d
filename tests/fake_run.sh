#!/usr/bin/env bash
# The interpreter of a run of fake_run.py: launch.sh starts that module in place of its launcher.
words=("$@")
if [ "$1 $2" = "-m accerl_mp.launcher.torchrun" ]; then words=(-m tests.fake_run start "${@:3}"); fi
exec "$ACCERL_TEST_PYTHON" "${words[@]}"
