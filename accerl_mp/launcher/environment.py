"""The environment of each role: threads, GPUs, vLLM's switches. The one table of such settings. Standard library only."""

import contextlib
import importlib.util
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.topology import GpuPlan, plan_gpus, visible_gpus

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""What torchrun sets for its ranks, whole names or prefixes: other processes must not take themselves for one."""

_EVERYBODY = {
    "HF_HUB_OFFLINE": "1",  # models are folders; nothing is ever looked up
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "SPT_NOENV": "1",  # setproctitle would overwrite /proc/PID/environ
    "GLOO_SOCKET_IFNAME": "lo",  # one machine; a container's host name need not resolve
    "NCCL_SOCKET_IFNAME": "lo",  # likewise: NCCL's own sockets only bring the ranks together
    "NCCL_CUMEM_ENABLE": "0",  # must be the same on both sides of the weight group, and vLLM chooses 0
}

_VLLM = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would not set its own parent-death signal
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}

_COMPILERS = 4
"""Processes in which a rank compiles its layer's kernels: some twenty, once."""

_VLLM_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding takes whole cores, which the trainer needs too
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM's small compiled helpers would want a C++ compiler, and one that fails where a path has a space in it.
    "TORCH_COMPILE_DISABLE": "1",
}

_SPLITS = re.compile(r"[\s:]")
"""What ends a path in LD_PRELOAD."""


def gpu_plan(config: Config) -> GpuPlan:
    """Which process gets which GPUs, from a resolved Config and what is visible here."""
    run, inference = config.run, config.inference
    gpus = [] if run.placement == "cpu" else visible_gpus()
    return plan_gpus(
        gpus,
        placement=run.placement,
        world_size=run.fsdp_world_size or 1,
        infer_size=inference.infer_size or 1,
        infer_tp_size=inference.infer_tp_size,
    )


def role_environment(role: str, index: int, *, config: Config, plan: GpuPlan, base: Mapping[str, str]) -> dict[str, str]:
    """All variables of a process under the supervisor, from the supervisor's own (`base`)."""
    environment = {name: value for name, value in base.items() if not name.startswith(_TORCHRUN)}
    environment |= _EVERYBODY | thread_caps(num_threads(role, config))
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.inference[index]) if role == "inference" else ""
    if role == "inference":
        environment |= _VLLM | (_VLLM_CPU if config.run.placement == "cpu" else {})
    return environment


def vllm_places(sockets: Path, config: Config, base: Mapping[str, str]) -> dict[str, str]:
    """vLLM's own ipc sockets live in the run's socket folder, so that they go with it whatever happens.

    And on CPU vLLM has the loader load torch's OpenMP first, named by its path, which the loader would split at a space. So
    where that has one, it gets a link beside the sockets.
    """
    places = {"VLLM_RPC_BASE_PATH": str(sockets)}
    loaded_first = base.get("LD_PRELOAD", "")
    if config.run.placement != "cpu" or any(name in loaded_first for name in ("libgomp", "libomp", "libiomp")):  # vLLM leaves it at that
        return places
    library = next(_openmp_of_torch(), None)
    if library is None or not _SPLITS.search(str(library)) or _SPLITS.search(str(sockets)):
        return places
    link = sockets / library.name
    with contextlib.suppress(OSError):  # it is there from an earlier start; a full disk costs a warning of the loader's
        link.symlink_to(library)
    return places | ({"LD_PRELOAD": ":".join(filter(None, (loaded_first, str(link))))} if link.exists() else {})


def _openmp_of_torch() -> Iterator[Path]:
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin:
        package = Path(found.origin).parent
        for folder in (package.parent / "torch.libs", package / "lib"):
            yield from folder.glob("libgomp*.so*")


def rank_environment(config: Config, plan: GpuPlan) -> dict[str, str]:
    """What a trainer rank sets for itself before it imports torch; torchrun has started it."""
    threads = thread_caps(num_threads("trainer", config))
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if config.run.deterministic else {}  # torch asks for it
    compilers = {"TORCHINDUCTOR_COMPILE_THREADS": str(_COMPILERS)} if config.model.compile == "on" else {}
    # Packs differ in length: memory that grows in place does not fall into pieces. CUDA IPC, which colocated pushes use, cannot share it.
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if config.run.placement == "dedicated" else {}
    return _EVERYBODY | threads | workspace | compilers | memory | {"CUDA_VISIBLE_DEVICES": ",".join(plan.trainer)}


def num_threads(role: str, config: Config) -> int:
    """Threads of one process's pools: OpenMP, MKL, OpenBLAS, tokenizers."""
    cores = len(os.sched_getaffinity(0))
    is_cpu = config.run.placement == "cpu"
    if role == "trainer":
        return 1 if is_cpu else max(1, min(8, cores // (2 * config.run.fsdp_world_size)))
    if role == "inference":
        # On CPU the ranks compute at the same time, a thread each.
        return max(1, (cores - config.run.fsdp_world_size) // config.inference.infer_size) if is_cpu else max(1, min(8, cores // 4))
    return 1


def thread_caps(number: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(number))


@contextlib.contextmanager
def inference_environment(config: Config, sockets: Path) -> Iterator[None]:
    """Make this process one that may hold an engine, as a tool does. Before torch or vllm is imported; its GPUs stay those it sees.

    Only what names a link beside the sockets is put back at the end: they go, and another engine may come.
    sockets: folder of vLLM's own ipc sockets; its path must be short
    """
    is_cpu = config.run.placement == "cpu"
    num_threads_here = len(os.sched_getaffinity(0)) if is_cpu else num_threads("inference", config)
    preloaded = {name: value for name, value in os.environ.items() if name == "LD_PRELOAD"}
    os.environ.update(_EVERYBODY | thread_caps(num_threads_here) | _VLLM | (_VLLM_CPU if is_cpu else {}))
    os.environ.update(vllm_places(sockets, config, os.environ))
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)
        os.environ.update(preloaded)


def launch_words() -> str:
    """What `bash launch.sh` has to stand behind when it is typed again: the interpreter, where the user has named one."""
    python = os.environ.get("ACCERL_PYTHON")
    return f"ACCERL_PYTHON={shlex.quote(python)} " if python else ""
