"""The Python blocks of a page in docs/, for tests that run them."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> dict[str, list[str]]:
    """The blocks of a page, by the heading that they stand under."""
    parts = re.split(r"^#+ (.+)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    code = [re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for text in parts[2::2]]
    return dict(zip(parts[1::2], code, strict=True))


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run blocks with these names, to which theirs are added."""
    exec(code, names)  # noqa: S102  # the repository's own pages
    return names
