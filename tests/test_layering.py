"""The dependency rules of the package, read from its source, and what the torch-free roles really load.

1. A module imports its own folder and lower rows; folders of one row never import each other.
2. One outside system, one home.
3. Row 0, transport, rollout, ingest and stats import no torch; neither do the advantage and packing maths.
4. `__init__.py` files are empty.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "accerl_mp"

ROWS = {
    **dict.fromkeys(("algorithms", "transport", "models"), 1),
    **dict.fromkeys(("weight_sync",), 2),
    **dict.fromkeys(("trainer", "inference", "rollout", "ingest", "stats"), 3),
    **dict.fromkeys(("launcher", "presets"), 4),
    **dict.fromkeys(("tools",), 5),
}
"""Folders; a module at the top of the package is row 0."""

HOMES = {
    "zmq": ("transport/",),
    "textworld": ("rollout/env.py", "tools/make_games.py", "tools/challenges.py"),
    "vllm": ("inference/", "weight_sync/"),
    "torch.distributed": ("models/", "weight_sync/", "trainer/"),
    "tensorboard": ("stats/",),
    # Beside its homes: a process's parent (transport/process), where to stop (debugging), a hash seed for its own children (make_games).
    "os.environ": ("topology.py", "log.py", "launcher/", "transport/process.py", "debugging.py", "tools/make_games.py"),
}

TORCH_FREE = ("transport/", "rollout/", "ingest/", "stats/", "algorithms/rewards", "algorithms/advantages", "algorithms/packing")


def modules() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def is_torch_free(module: Path) -> bool:
    return len(module.parts) == 1 or str(module).startswith(TORCH_FREE)


@cache
def imports_of(module: Path) -> frozenset[str]:
    """Dotted names that a module imports anywhere, functions included; `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def absolute(module: Path, node: ast.ImportFrom) -> str:
    """What `from ..x import y` means in this module."""
    if not node.level:
        return str(node.module)
    package = ("accerl_mp", *module.parts[:-1])
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))


@cache
def uses_of(module: Path) -> frozenset[str]:
    """Imports, and dotted attributes such as `os.environ` or `torch.distributed.barrier`."""
    attributes = {ast.unparse(node) for node in ast.walk(ast.parse((PACKAGE / module).read_text())) if isinstance(node, ast.Attribute)}
    environ = {"os.environ"} if {"os.getenv", "os.putenv"} & attributes else set()
    return imports_of(module) | attributes | environ


def uses(module: Path, system: str) -> bool:
    return any(name == system or name.startswith(f"{system}.") for name in uses_of(module))


def folder_of(module: Path) -> str:
    """Empty for a module at the top of the package."""
    return module.parts[0] if len(module.parts) > 1 else ""


def row_of(folder: str) -> int:
    assert not folder or folder in ROWS, f"accerl_mp/{folder} has no row: add it to ROWS"
    return ROWS.get(folder, 0)


def own_imports(module: Path) -> Iterator[str]:
    """Folder of each module of ours that it imports."""
    for name in imports_of(module):
        match name.split("."):
            case ["accerl_mp", first, *_]:
                yield first if (PACKAGE / first).is_dir() else ""


def test_a_module_imports_its_own_folder_and_lower_rows_only() -> None:
    wrong = [
        f"{module} imports accerl_mp.{target or '(top)'}"
        for module in modules()
        for target in sorted(set(own_imports(module)))
        if target != (own := folder_of(module)) and row_of(target) >= row_of(own)
    ]
    assert wrong == []


@pytest.mark.parametrize("system", HOMES)
def test_an_outside_system_has_one_home(system: str) -> None:
    wrong = [str(module) for module in modules() if uses(module, system) and not str(module).startswith(HOMES[system])]
    assert wrong == []


def test_the_light_roles_name_no_torch() -> None:
    heavy = ("torch", "transformers", "vllm", "safetensors.torch")
    wrong = [f"{module}: {system}" for module in modules() if is_torch_free(module) for system in heavy if uses(module, system)]
    assert wrong == []


def test_init_files_are_empty() -> None:
    assert [str(module) for module in modules() if module.name == "__init__.py" and (PACKAGE / module).stat().st_size] == []


@pytest.mark.parametrize("role", ["rollout", "ingest", "stats"])
def test_a_light_role_loads_no_torch(role: str) -> None:
    """Really imported: a library may pull torch in behind our back."""
    assert loaded_by([f"accerl_mp.{role}.__main__"], ["torch", "transformers", "vllm", "tensorflow"]) == []


def test_no_light_module_loads_torch() -> None:
    names = [dotted(module) for module in modules() if is_torch_free(module) and module.name != "__init__.py"]
    assert loaded_by(names, ["torch", "transformers", "vllm"]) == []


def test_only_rollouts_load_textworld() -> None:
    assert loaded_by(["accerl_mp.ingest.__main__", "accerl_mp.stats.__main__"], ["textworld"]) == []


def test_the_supervisor_loads_the_standard_library_only() -> None:
    """It is forked from rank 0 before anything heavy, and stays small and single-threaded."""
    code = "import sys, accerl_mp.launcher.supervisor; print(*{name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    loaded = {name for name in run_python(code) if not name.startswith(("_", "sitecustomize"))}
    assert loaded <= {"accerl_mp", "setproctitle"}


def dotted(module: Path) -> str:
    return ".".join(("accerl_mp", *module.with_suffix("").parts))


def loaded_by(names: list[str], heavy: list[str]) -> list[str]:
    """Which of `heavy` a fresh interpreter holds once it has imported `names`."""
    return run_python(f"import sys, {', '.join(names)}; print(*[name for name in {heavy} if name in sys.modules])")


def run_python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
