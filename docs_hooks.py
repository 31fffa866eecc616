"""Pages of the site for the files outside of docs/ that its pages link to.

mkdocs calls these functions; mkdocs.yml names this file. A link such as
`../examples/digits_fit.py` leads to the file where the text is read in the
repository, and to a page with its source on the site.
"""

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent
LINK = re.compile(r"\]\((\.\./[^)#\s]+)\)")
NAMED_BY_FILE = re.compile(r"\[[\w./-]+\.md\]\(([^)#\s]+\.md)(#[^)\s]*)?\)")
LANGUAGES = {
    ".ipynb": "json",
    ".py": "python",
    ".txt": "text",
    ".yaml": "yaml",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside of docs/ that a page links to."""
    outside = {
        path
        for file in files.documentation_pages()
        for link in LINK.findall(file.content_string)
        if (path := path_outside(file.src_uri, link))
    }
    for path in sorted(outside):
        files.append(
            File.generated(config, page_of(path), content=source_page(path))
        )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Leads links to files outside of docs/ to their pages.

    A link whose text is the name of a page's file gets the page's title.
    """
    here = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        path = path_outside(here, match[1])
        if path is None:
            return match[0]
        place = posixpath.relpath(page_of(path), posixpath.dirname(here) or ".")
        return f"]({place})"

    def titled(match: re.Match[str]) -> str:
        path = ROOT / "docs" / posixpath.dirname(here) / match[1]
        if not path.is_file():
            return match[0]
        title = path.read_text("utf-8").split("\n", 1)[0].removeprefix("# ")
        return f"[{title}]({match[1]}{match[2] or ''})"

    return NAMED_BY_FILE.sub(titled, LINK.sub(led, markdown))


def path_outside(page: str, link: str) -> str | None:
    """A link's path in the repository, or None if it stays in docs/."""
    directory = posixpath.dirname(f"docs/{page}")
    path = posixpath.normpath(posixpath.join(directory, link))
    is_file = (ROOT / path).is_file()
    return path if is_file and not path.startswith("docs/") else None


def page_of(path: str) -> str:
    """The page for a file of the repository."""
    return f"source/{path}.md"


def source_page(path: str) -> str:
    """The text of the page: the file, as code."""
    file = ROOT / path
    language = LANGUAGES.get(file.suffix, "sh")
    source = file.read_text("utf-8")
    return f"# {path}\n\n````{language}\n{source}\n````\n"
