"""What the documentation's build adds to docs/: a hook of mkdocs (see mkdocs.yml).

The documents link to files of the repository, so that they can be read without a site. Here each linked file becomes a
page of the site, and the links lead there. README.md is the first page, and the RPC reference is made from the protos.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts import rpc_reference  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "benchmarks/RESULTS-vllm.md": "benchmarks-vllm.md",
    "benchmarks/RESULTS-vllm-concurrent.md": "benchmarks-vllm-concurrent.md",
    "benchmarks/RESULTS-vllm-prefix.md": "benchmarks-vllm-prefix.md",
    "tests/faults/RESULTS.md": "faults.md",
    "examples/README.md": "examples.md",
    "examples/grpcurl.md": "grpcurl.md",
    "protos/kvferry/v1": "reference/rpc.md",
}
"""Files of the repository that have a place of their own in the site."""

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
LANGUAGES = {".go": "go", ".py": "python", ".json": "json", ".ts": "typescript", ".proto": "protobuf", ".sh": "bash"}
CITED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and every file of the repository that a page links to."""
    files.append(File.generated(config, "reference/rpc.md", content=rpc_reference.page()))
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None]
    waiting += [path for path in PAGES if path.endswith(".md")]
    seen = {*waiting, "protos/kvferry/v1"}
    while waiting:
        path = waiting.pop()
        text, cited = page_of(path)
        if not path.startswith("docs/"):
            level = InclusionLevel.INCLUDED if path in PAGES else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, site_path(path), content=text, inclusion=level))
        waiting += sorted(cited - seen)
        seen |= cited
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links of a document in docs/, as the site has them."""
    return markdown if page.file.generated_by else rewritten(markdown, f"docs/{page.file.src_uri}")[0]


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"source/{path}{'' if path.endswith('.md') else '.md'}"


def page_of(path: str) -> tuple[str, set[str]]:
    """The page of a file, and the files that it links to."""
    file = ROOT / path
    if file.is_dir():
        listed = sorted(found.relative_to(ROOT).as_posix() for found in file.rglob("*") if found.is_file())
        names = [name for name in listed if not name.endswith((".pyc", "__init__.py"))]
        return f"{CITED}# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n", set()
    text = file.read_text() if file.suffix not in {".svg", ".png"} else ""
    if file.suffix == ".md":
        return rewritten(text, path)
    language = LANGUAGES.get(file.suffix, "text")
    return f"{CITED}# {path}\n\n~~~~~~ {language}\n{text.rstrip()}\n~~~~~~\n", set()


def rewritten(text: str, path: str) -> tuple[str, set[str]]:
    """A document with its links as the site has them, and the files of the repository that it links to."""
    cited: set[str] = set()
    here = posixpath.dirname(site_path(path)) or "."

    def link(found: re.Match[str]) -> str:
        before, target, fragment, after = found[1], found[2], found[3] or "", found[4]
        if ":" in target:
            return found[0]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        # mkdocs names the document whose link leads nowhere.
        if not whole.startswith("docs/") and (ROOT / whole).exists():
            cited.add(whole)
        return f"{before}{posixpath.relpath(site_path(whole), here)}{fragment}{after}"

    return LINK.sub(link, text), cited
