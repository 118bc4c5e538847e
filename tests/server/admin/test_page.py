"""The page in a real browser: its content, and that names from strangers have no effect."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from kvferry._wire.channel import connect
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.admin.page import Html, each, html
from tests.server.admin.conftest import Watched
from tests.support.admin_listeners import get
from tests.support.node_servers import Kvferryd
from tests.support.raw_parties import Party
from tests.support.waiting import until

EVIL = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'\"&"
BROWSER = "chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1200,1600",
]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A node server with an engine and a request that have malicious names."""
    path = tmp_path_factory.mktemp("page") / "node.sock"
    with ExitStack() as stack:
        flags = ["--unix", str(path), "--listen", "", "--admin", "127.0.0.1:0", "--drain", "0"]
        # Longer than a browser takes to start: an expired lease would be one more ended read.
        flags += ["--ttl", "600", "--max-ttl", "600"]
        server = stack.enter_context(Kvferryd(*flags, "--log-level", "debug"))
        party = Party(stack.enter_context(connect(server.address)), EVIL)
        stack.callback(party.close)
        party.works()
        publish = party.publish_notification(party.publication + 1)
        publish.publish.request_id = EVIL
        party._notify(publish)
        party.publication += 1
        done = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=7)
        party.notify_reader(pb.Notification(read_done=pb.ReadDone(lease_id=party.read(), reports=[done])))
        yield Watched(server, party)


def browse(folder: Path, url: str) -> tuple[str, str]:
    """The page in a browser after five seconds of its scripts, and the browser's complaints."""
    if shutil.which(BROWSER) is None:
        pytest.skip(f"{BROWSER} is not installed")
    flags = [*FLAGS, f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, url], capture_output=True, text=True, check=True, timeout=90)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.slow
def test_page_shows_engines_reads_and_requests_and_stays_live(named: Watched, tmp_path: Path) -> None:
    page, complaints = browse(tmp_path, f"http://{named.admin}/")
    assert complaints == ""
    assert "<title>kvferry: " in page
    assert "pwned" not in unescape(re.findall(r"<title>(.*?)</title>", page)[0])
    # As text, not as elements.
    assert page.count("<script") == 1
    assert "<img" not in page
    for name in ("engines", "reads", "requests"):
        found = re.search(rf'<table id="{name}">.*?</table>', page, re.DOTALL)
        assert found is not None, name
        assert EVIL in unescape(re.sub(r"<[^>]+>", "", found[0])), name
    # Two reads have ended, each with a bar.
    timeline = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert timeline is not None
    assert timeline[0].count("<rect") == 2
    assert timeline[0].count(" 7 bytes") == 2
    # The script has reloaded the page.
    assert re.search(r'<span id="updated">[^<]+</span>', page)


def test_engine_page_shows_the_ranks(named: Watched) -> None:
    got = get(named.admin, "/engine?" + urlencode({"engine_id": named.party.name}))
    assert got.code == 200
    assert 'id="ranks"' in got.text
    assert "registered" in got.text
    assert EVIL not in got.text


def test_first_page_says_while_the_node_server_waits_for_its_engines(tmp_path: Path) -> None:
    flags = ["--unix", f"{tmp_path}/node.sock", "--listen", "", "--admin", "127.0.0.1:0", "--drain", "0"]
    said = "waits for engines"
    with Kvferryd(*flags, "--engine-ttl", "600") as server:
        assert said in get(server.admin, "/").text
    with Kvferryd(*flags, "--engine-ttl", "0.01") as server:
        until(lambda: said not in get(server.admin, "/").text)


def test_templates_escape_values_that_are_not_html() -> None:
    evil = '"><script>{0.__class__}'
    escaped = "&quot;&gt;&lt;script&gt;{0.__class__}"
    assert html('<p title="{}">{name}</p>', evil, name=evil) == f'<p title="{escaped}">{escaped}</p>'
    assert html("<p>{}{:.1f}</p>", Html("<b>x</b>"), 1.25) == "<p><b>x</b>1.2</p>"
    assert each("<b>{0}{0}</b>", [1, "<"]) == "<b>11</b><b>&lt;&lt;</b>"
