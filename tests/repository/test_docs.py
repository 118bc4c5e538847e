"""The documents agree with the repository: links, cited files, snippets, and what the references describe."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry._cli import app
from kvferry.v1 import admin_pb2, errors_pb2, geometry_pb2, introspection_pb2, kv_transfer_pb2
from scripts import rpc_reference
from tests.support.repository import ROOT

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "docs/reference", "examples", "benchmarks", "tests/faults", "tests/integrations/vllm")
    for path in (ROOT / folder).glob("*.md")
)
MADE = {"docs/reference/rpc.md"}
"""Made by `make docs`."""

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CITED = re.compile(
    r"(?<![\w/.-])((?:\.ci|benchmarks|client|docs|examples|protos|scripts|server|tests)/[\w./-]*[^\W_])(?![\w*…{<-])"
)
SETTINGS = ("Makefile", "buf.yaml", "mkdocs.yml", "pyproject.toml")


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def prose(document: str) -> str:
    """Without code blocks."""
    return FENCE.sub("", text_of(document))


def anchors(document: str) -> set[str]:
    """Of its headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in plain}


def snippets(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", sorted({*DOCUMENTS} - {"CHANGELOG.md"}))
def test_commands_that_documents_name_exist(document: str) -> None:
    """docs/errors.md tells what to do next."""
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    named = set(re.findall(r"(?:`|\$ )kvferry ([a-z][a-z-]*)", text_of(document)))
    assert {name.replace("-", "_") for name in named} <= {name.replace("-", "_") for name in commands}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_documents_have_targets(document: str) -> None:
    dead = []
    for image, words, link in LINK.findall(prose(document)):
        if re.match(r"\w+:", link):
            continue
        if image:
            assert words.strip(), f"{link} has no text alternative"
        target, _, fragment = link.partition("#")
        path = (ROOT / document).parent / target if target else ROOT / document
        whole = path.resolve().relative_to(ROOT).as_posix()
        if whole in MADE:
            continue
        if not path.exists() or (fragment and fragment not in anchors(whole)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("document", [*DOCUMENTS, *SETTINGS])
def test_cited_paths_exist(document: str) -> None:
    cited = {path.rstrip("/.") for path in CITED.findall(text_of(document))}
    # What is built, not kept.
    cited -= {
        "tests/support/nodejs/node_modules",
        "tests/support/nodejs/node_modules/.bin/buf",
        "tests/support/nodejs/node_modules/.installed",
    }
    assert sorted(path for path in cited if not (ROOT / path).exists() and path not in MADE) == []


def test_modules_of_the_architecture_define_the_names_in_brackets() -> None:
    wrong = []
    for module, names in re.findall(r"`(\w+/[\w/]+)` \(([^)]*)\)", text_of("docs/architecture.md")):
        paths = [ROOT / package / f"{module}.py" for package in ("client/kvferry", "server/kvferry_server")]
        code = "".join(path.read_text() for path in paths if path.exists())
        wrong += [f"{module}: {name}" for name in re.findall(r"`(\w+)`", names) if not re.search(rf"\b{name}\b", code)]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_merges_are_finished(document: str) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})", text_of(document), re.MULTILINE)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if snippets(name)])
def test_snippets_are_python_and_import_existing_names(document: str) -> None:
    for snippet in snippets(document):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvferry":
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_readme_fits_a_screen_or_two() -> None:
    assert len(text_of("README.md").split()) <= 700


def test_the_two_files_for_vllm_differ_in_their_role_alone() -> None:
    prefill, decode = (
        json.loads((ROOT / "examples" / "vllm" / f"{name}.json").read_text()) for name in ("prefill", "decode")
    )
    assert (prefill.pop("kv_role"), decode.pop("kv_role")) == ("kv_producer", "kv_consumer")
    assert prefill == decode


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_and_a_description(picture: Path) -> None:
    drawn = picture.read_text()
    assert all(re.search(rf"<{tag} id=[^>]+>[^<]+</{tag}>", drawn) for tag in ("title", "desc"))


def described() -> list[str]:
    """What the Python reference describes."""
    pages = [text_of(document) for document in DOCUMENTS if document.startswith("docs/reference/")]
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


def test_python_reference_describes_existing_names() -> None:
    def found(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            return getattr(found(module), attribute)

    for name in described():
        assert found(name) is not None


def test_python_reference_describes_all_exports_of_kvferry() -> None:
    names = described()
    # Errors are described with their module, ports under the name that they have there.
    missing = [name for name in kvferry.__all__ if not {f"kvferry.{name}", f"kvferry.engine.{name}"} & set(names)]
    assert missing == ["__version__", "KvferryError"]
    engine = importlib.import_module("kvferry.engine")
    public = [name for name in vars(engine) if name[0].isupper()]
    assert [name for name in public if f"kvferry.engine.{name}" not in names] == []


def test_the_rpc_reference_describes_every_declaration_with_a_comment() -> None:
    described = {
        declared.name: declared
        for name in rpc_reference.FILES
        for declared in rpc_reference.declarations((rpc_reference.PROTOS / f"{name}.proto").read_text())[1]
    }
    expected: dict[str, Any] = {}
    for module in (kv_transfer_pb2, introspection_pb2, admin_pb2, geometry_pb2, errors_pb2):
        file: Any = module.DESCRIPTOR
        expected |= {name: service.methods_by_name for name, service in file.services_by_name.items()}
        expected |= {name: message.fields_by_name for name, message in file.message_types_by_name.items()}
        expected |= {name: enum.values_by_name for name, enum in file.enum_types_by_name.items()}
    assert {name: [member.name for member in declared.members] for name, declared in described.items()} == {
        name: list(members) for name, members in expected.items()
    }
    everything = [one for declared in described.values() for one in (declared, *declared.members)]
    assert [one.name for one in everything if not one.comment] == []


def test_links_within_the_rpc_reference_have_targets() -> None:
    page = rpc_reference.page()
    headings = Counter(re.findall(r"^#+ (\S+)$", page, re.MULTILINE))
    linked = set(re.findall(r"\[(\w+)\]\(#\w+\)", page))
    assert linked
    # A heading that comes twice gets another anchor.
    assert [name for name in linked if headings[name] != 1] == []


DURATION = re.compile(r"^\| (.+) \| ([\d., +]*) \| `([\w/.]+\.py)`(?:: (.+))? \|$", re.MULTILINE)


def test_durations_are_set_where_the_architecture_says() -> None:
    """The row's names are there, with the row's values."""
    rows = DURATION.findall(text_of("docs/architecture.md"))
    assert len(rows) >= 10
    for what, values, path, names in rows:
        code = (ROOT / path).read_text()
        for name, value in zip(re.findall(r"`(\w+)`", names), re.findall(r"[\d.]+", values), strict=False):
            found = re.search(rf"^\s*{name}(?:: \w+)? = ([\d.]+)(?:  #.*)?$", code, re.MULTILINE)
            assert name == "CHANNEL_OPTIONS" or (found and float(found[1]) == float(value)), (what, name)
            assert name in code, (what, path, name)
