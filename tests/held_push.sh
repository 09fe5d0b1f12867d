#!/usr/bin/env bash
# The interpreter of a run whose pushes can be held (held_push.py): launch.sh starts that module in place of its launcher.
words=("$@")
if [ "$1 $2" = "-m accerl_mp.launcher.torchrun" ]; then words=(-m tests.held_push "${@:3}"); fi
exec "$ACCERL_TEST_PYTHON" "${words[@]}"
