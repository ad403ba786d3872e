"""List the links of a built site that lead nowhere: files and anchors that are missing, addresses that are none.

    python tools/site_links.py build/site

Nothing is fetched: addresses of other sites are checked for their form.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page and the links on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken(site: Path) -> list[str]:
    """Return ``page: link`` for each link that leads nowhere."""
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    return [
        f"{path.relative_to(site)}: {link}"
        for path, page in sorted(pages.items())
        for link in sorted(page.links)
        if not _leads_somewhere(link, path, pages)
    ]


def _leads_somewhere(link: str, path: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return True
    if parts.scheme or parts.netloc:
        return re.fullmatch(r"https?://[\w-]+(\.[\w-]+)+(/[^\s]*)?", link) is not None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target in pages:
        return unquote(parts.fragment) in pages[target].anchors
    return target.is_file() and not parts.fragment


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]).resolve())
    print("\n".join([*found, f"{len(found)} links lead nowhere"]))
    sys.exit(bool(found))
