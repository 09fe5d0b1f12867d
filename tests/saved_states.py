"""A run's saved states without a model: what recovery looks at."""

from pathlib import Path
from typing import Any

from accerl_mp import recovery
from accerl_mp.config import Config

FILES = (".metadata", "__0_0.distcp", "rank-0.msgpack")


def state_content(step: int, version: int, **others: Any) -> dict[str, Any]:
    """What state.json holds."""
    content = {
        "format": recovery.FORMAT,
        "step": step,
        "version": version,
        "next_version": version + 1,
        "num_ranks": 1,
        "trainer": {"step": step},
        "groups": {"next": 3, "low_water": 2, "done_above": []},
        "strikes": None,
        "identity": {},
        "files": {},
    }
    return content | others


def save_state(resume_dir: Path, step: int, config: Config) -> Path:
    """The newest state, of one rank, its version as high as its step."""
    folder = resume_dir / recovery.folder_name(step, step)
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(bytes(range(250)) * 4)
    files = {name: (1000, recovery.checksum(folder / name)) for name in FILES}
    content = state_content(step, step, identity=recovery.identity(config), files=files)
    (folder / "state.json").write_text(recovery.state_text(content))
    (resume_dir / "current").write_text(folder.name + "\n")
    return folder
