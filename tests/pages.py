"""The README and the pages beside it, as one text for the tests that hold them to the code."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "accerl_mp/docs").glob("*.md")))}
README = PAGES[ROOT / "README.md"]
ALL = "\n".join(PAGES.values())
