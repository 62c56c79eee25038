"""The documentation as a site: built without a warning, self-contained, and with links that lead somewhere."""

import logging
import os
import posixpath
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from tepal import client_app, exchange, models, strategies
from tests.packages import ROOT

pytest.importorskip("mkdocs")

DOCS = ROOT / "docs"


class Page(HTMLParser):
    """What one page of the site links to, what it loads, and where one can link to in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors, self.styles = [], [], set(), []
        self._in_style = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        self._in_style = tag == "style"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(given["href"])
        elif given.get("src"):
            self.loads.append(given["src"])
        self.loads += [each.split()[0] for each in (given.get("srcset") or "").split(",") if each.strip()]
        self.styles += [given["style"]] if given.get("style") else []

    def handle_endtag(self, tag):
        self._in_style = False

    def handle_data(self, data):
        if self._in_style:
            self.styles.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    # 404.html is shown at any path by a server, and has the paths of the site's root.
    return {str(p.relative_to(site)): Page(p) for p in site.rglob("*.html") if p.name != "404.html"}


def target(page, link):
    """(file, anchor) that a link of a page leads to; None where that is another site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path))) if parts.path else page
    return path, unquote(parts.fragment)


@pytest.mark.long
def test_every_page_is_built_and_in_the_navigation(pages):
    sources = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert sources == pages.keys()
    reached = {target("index.html", link) for link in pages["index.html"].links}
    assert sources <= {found[0] for found in reached if found}


@pytest.mark.long
def test_every_link_leads_to_a_page_and_a_place_in_it(site, pages):
    nowhere = []
    for name, page in pages.items():
        for link in page.links:
            found = target(name, link)
            if found is None:
                continue
            path, anchor = found
            of_page = pages.get(path)
            if not ((not anchor or anchor in of_page.anchors) if of_page else (site / path).is_file()):
                nowhere.append(f"{name}: {link}")
    assert not nowhere


@pytest.mark.long
def test_no_link_leaves_for_files_of_the_repository(pages):
    """Without a known place of the repository there is nothing to link to; the text says which file it is."""
    outside = [link for page in pages.values() for link in page.links if re.search(r"\.(py|toml|sh)$", link)]
    assert not outside


def rendered(text, *, page="methods/a.md", repo_url=None):
    from markdown import Markdown

    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    site = SimpleNamespace(extra={"source": page}, repo_url=repo_url)
    return Markdown(extensions=[hooks["LinksOut"](site)]).convert(text)


def test_links_to_files_of_the_repository_lead_to_where_it_is_or_nowhere(caplog):
    text = "[`app.py`](../../client_app/app.py), [data](../data.md), [top](#a), [it](https://flower.ai)"
    plain = rendered(text)
    assert '<span title="client_app/app.py in the repository"><code>app.py</code></span>' in plain
    assert re.findall('href="([^"]*)"', plain) == ["../data.md", "#a", "https://flower.ai"]
    known = rendered(text + " [conf](../../conf)", repo_url="https://example.org/tepal/")
    assert "https://example.org/tepal/blob/HEAD/client_app/app.py" in known
    assert "https://example.org/tepal/tree/HEAD/conf" in known
    with caplog.at_level(logging.WARNING):
        rendered("[gone](../gone.py)", page="a.md")
    assert "a.md links to gone.py, which the repository does not have" in caplog.text


@pytest.mark.long
def test_everything_that_a_page_loads_is_of_the_site(site, pages):
    for name, page in pages.items():
        for load in page.loads:
            found = target(name, load)
            assert found is not None and (site / found[0]).is_file(), f"{name} loads {load}"
        for style in page.styles:
            assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", style), f"{name}: {style[:200]}"


@pytest.mark.long
def test_no_style_or_picture_asks_another_host(site):
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert "@import" not in text, path
        for asked in re.findall(r"url\(\s*['\"]?([^'\")]*)", text):
            assert asked.startswith(("data:", "#")) or (path.parent / asked).is_file(), f"{path}: {asked}"
        assert not re.search(r"(href|src)\s*=\s*['\"]https?:", text), path


@pytest.mark.long
def test_the_reference_has_every_public_name(pages):
    for package in (client_app, exchange, models, strategies):
        page = pages[f"reference/{package.__name__.split('.')[1]}.html"]
        missing = [name for name in package.__all__ if f"{package.__name__}.{name}" not in page.anchors]
        assert not missing, package.__name__


@pytest.mark.long
def test_pictures_are_described(site):
    for path in [DOCS / "main-job.svg", *DOCS.glob("methods/*.svg")]:
        text = path.read_text()
        assert "<title" in text and "<desc" in text, path
    for path in site.rglob("*.html"):
        for image in re.findall(r"<img[^>]*>", path.read_text()):
            assert re.search(r'alt="[^"]+"', image), f"{path.name}: {image}"
