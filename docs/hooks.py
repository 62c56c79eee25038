"""What the site (mkdocs.yml) does beside its plugins: links out of docs/.

Pages link to files of the repository by relative paths, which work wherever the repository itself is read. The site has
no such files: there the link leads to them in the repository that `repo_url` names, and without one it is plain text.
"""

from __future__ import annotations

import posixpath
from logging import getLogger
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

ROOT = Path(__file__).parents[1]
AFTER_INLINE, BEFORE_MKDOCS = 20, 0  # priorities: links are made by the one, and checked by the other

log = getLogger("mkdocs.hooks.repository")


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(LinksOut(config))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    config.extra["source"] = page.file.src_uri
    return markdown


class LinksOut(Extension):
    """Links that leave docs/, see above. One to a file that is not there is a warning, which fails a strict build."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.site = config

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_LinksOut(md, self.site), "links_out", (AFTER_INLINE + BEFORE_MKDOCS) / 2)


class _LinksOut(Treeprocessor):
    def __init__(self, md: Markdown, site: Any) -> None:
        super().__init__(md)
        self.site = site

    def run(self, root: Element) -> None:
        page = self.site.extra["source"]
        for link in root.iter("a"):
            path = left(page, link.get("href", ""))
            if path is None:
                continue
            if not (ROOT / path).exists():
                log.warning("%s links to %s, which the repository does not have", page, path)
            if self.site.repo_url:
                kind = "tree" if (ROOT / path).is_dir() else "blob"
                link.set("href", f"{self.site.repo_url.rstrip('/')}/{kind}/HEAD/{path}")
            else:
                link.tag = "span"
                del link.attrib["href"]
                link.set("title", f"{path} in the repository")


def left(page: str, href: str) -> str | None:
    """The file of the repository that a link of this page leads to, where that is outside of docs/."""
    target = urlsplit(href)
    if target.scheme or target.netloc or not target.path:
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.path))
    return None if path.startswith("docs/") else path
