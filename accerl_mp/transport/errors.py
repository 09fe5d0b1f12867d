"""The three ways in which waiting ends without what was waited for. All are picklable. Standard library only."""

import re
from pathlib import Path

from accerl_mp.files import read_text, write_over

EXIT_GAME_HUNG = 75
"""A rollout's exit code when it ends itself because of a game: a restart that doesn't count."""

_FILE_BYTES = 4096
_EXIT_CODE = re.compile(r"-?[0-9]{1,9}")

NOT_TRIED_AGAIN = ("WrongWeights", "NothingToPlay")
"""Errors, by the name that the text of a failure begins with, which a new start of the process or the run would only hide or repeat."""


class Closed(Exception):
    """The run ends normally: leave, this is no error."""


class PeerLost(RuntimeError):
    """A process that this one needs is gone and the run cannot go on."""

    def __init__(self, role: str, exit_code: int | None, log_file: str, detail: str = "") -> None:
        super().__init__(role, exit_code, log_file, detail)
        self.role, self.exit_code, self.log_file, self.detail = role, exit_code, log_file, detail

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        log = f", log file {self.log_file}" if self.log_file else ""
        return f"lost {self.role}{code}{log}" + (f": {self.detail}" if self.detail else "")

    def save(self, path: Path) -> None:
        """Write it as text, for processes that learn of it from the board (`failed`) and for people. After `clear` a full disk has room."""
        code = "" if self.exit_code is None else self.exit_code
        text = f"role: {self.role}\nexit code: {code}\nlog file: {self.log_file}\n\n{self.detail}\n"
        write_over(_spare(path), text, _FILE_BYTES)
        _spare(path).rename(path)

    @staticmethod
    def clear(path: Path) -> None:
        """Nothing is lost, and there is room to say so once something is: OSError where the disk is full before there is any."""
        if path.exists():
            path.rename(_spare(path))
        write_over(_spare(path), "", _FILE_BYTES)

    @classmethod
    def load(cls, path: Path) -> "PeerLost":
        """Read what `save` wrote; a missing or damaged file gives a nameless one."""
        try:
            head, _, detail = read_text(path, errors="surrogateescape").partition("\n\n")
        except OSError as error:
            return cls("a process of the run", None, "", f"{path} cannot be read ({error.strerror})")
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if "role" not in fields:
            return cls("a process of the run", None, "", f"{path} is damaged")
        code = fields.get("exit code", "").strip()
        return cls(fields["role"], int(code) if _EXIT_CODE.fullmatch(code) else None, fields.get("log file", ""), detail.strip())


def _spare(path: Path) -> Path:
    """Keeps the room for it, under a name that says nothing."""
    return path.with_name(f".{path.name}")


class DeadlineExpired(TimeoutError):
    """A named wait took longer than its flag allows."""

    def __init__(self, who: str, what: str, since_s: float, flag: str = "") -> None:
        super().__init__(f"{who} waited {since_s:.0f} s for {what}" + (f"; {flag} sets this limit" if flag else ""))
        self.who, self.what, self.since_s, self.flag = who, what, since_s, flag

    def __reduce__(self) -> tuple:
        # OSError keeps two arguments of four, so its own pickling would lose the rest.
        return DeadlineExpired, (self.who, self.what, self.since_s, self.flag)
