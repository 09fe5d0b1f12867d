#!/usr/bin/env bash
# Sets up the environment and runs the tests: `bash tests/run.sh [--full] [--setup-only] [pytest arguments]`.
# The default leaves out the slow ones; --full runs all that a machine without a GPU can, then (unless tests are named) a short soak.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
marks="not slow and not gpu"
soak_minutes=""
arguments=()
for word in "$@"; do
    case $word in
        --setup-only) exec bash launch.sh --placement cpu --setup-only ;;
        --full) marks="not gpu" soak_minutes=3 ;;
        *) arguments+=("$word") ;;
    esac
done

bash launch.sh --placement cpu --setup-only
python=${ACCERL_PYTHON:-}
if [ -z "$python" ]; then
    # On a GPU machine launch.sh put the CPU stack beside the GPU stack.
    python=$root/.venv/bin/python
    if [ -n "$(nvidia-smi -L 2>/dev/null | grep '^GPU ' || true)" ]; then python=$root/.venv-cpu/bin/python; fi
fi
export OMP_NUM_THREADS=1
"$python" -m pytest -m "$marks" ${arguments[@]+"${arguments[@]}"}
if [ -n "$soak_minutes" ] && [ ${#arguments[@]} = 0 ]; then
    exec "$python" tests/soak.py --minutes "$soak_minutes" --chaos
fi
