#!/usr/bin/env bash
# What a machine with GPUs should do. It uses the Python of ACCERL_PYTHON, else the environment that launch.sh makes.
#
#   bash tests/gpu/visit.sh tests [pytest arguments]                        the tests under tests/gpu
#   bash tests/gpu/visit.sh smoke dedicated|colocated RUN_DIR [FLAGS...]     a short run; MODEL_PATH and TEXTWORLD_GAME_DIR say of what
#   bash tests/gpu/visit.sh all OUT_DIR                                     both, with every placement that the GPUs allow
#
# The last line of a smoke run is a JSON object; the exit code is 1 unless every push arrived and the checks of them held.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=${ACCERL_PYTHON:-$PWD/.venv/bin/python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
rounds=8

gpu_tests() { "$python" -m pytest -p no:cacheprovider -m gpu tests/gpu "$@"; }

smoke() {
    local placement=$1 run_dir=$2
    shift 2
    bash launch.sh @accerl_mp/presets/smoke-2gpu.args --placement "$placement" --log-dir "$run_dir" --train-mode full --tw-game-limit 8 \
        --num-rollout-workers 4 --rollout-batch-size 8 --batch-size 16 --train-token-budget 8192 --replay-capacity 96 \
        --min-replay-size-per-rank 16 --max-steps "$rounds" --max-sync-rounds "$rounds" --verify-sync 3 --max-policy-lag 2 "$@" || return 1
    "$python" tests/gpu/read_run.py "$run_dir" --rounds "$rounds"
}

all() {
    local out=$1 code=0
    bash launch.sh --setup-only || return 1
    gpu_tests || code=1
    CUDA_VISIBLE_DEVICES=$(first_gpus 1) smoke colocated "$out/colocated" || code=1
    if [ "$(nvidia-smi -L | grep -c '^GPU ')" -ge 2 ]; then
        CUDA_VISIBLE_DEVICES=$(first_gpus 2) smoke dedicated "$out/dedicated" || code=1
    fi
    return $code
}

first_gpus() { seq -s, 0 $(($1 - 1)); }

case ${1-} in
    tests) shift && gpu_tests "$@" ;;
    smoke) shift && smoke "$@" ;;
    all) all "${2:?a folder for the runs}" ;;
    *) sed -n '2,8p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
