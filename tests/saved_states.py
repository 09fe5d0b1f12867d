"""A run's saved states without a model: what recovery looks at."""

from pathlib import Path

from accerl_mp import recovery
from accerl_mp.config import Config

FILES = (".metadata", "__0_0.distcp", "rank-0.msgpack")


def save_state(resume_dir: Path, step: int, config: Config) -> Path:
    """The newest state, of one rank, its version as high as its step."""
    folder = resume_dir / recovery.folder_name(step, step)
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(bytes(range(250)) * 4)
    content = {
        "format": recovery.FORMAT,
        "step": step,
        "version": step,
        "next_version": step + 1,
        "num_ranks": 1,
        "trainer": {"step": step},
        "groups": {"next": 3, "low_water": 2, "done_above": []},
        "strikes": None,
        "identity": recovery.identity(config),
        "files": {name: (1000, recovery.checksum(folder / name)) for name in FILES},
    }
    (folder / "state.json").write_text(recovery.state_text(content))
    (resume_dir / "current").write_text(folder.name + "\n")
    return folder
