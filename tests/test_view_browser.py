"""What `to_html` writes, opened in a real browser: Chromium, as Qt WebEngine carries it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import KVConfig, KVSpec, PrefixCache

pytestmark = pytest.mark.nightly  # Chromium is 150 MB that no other test needs

# Run in a process of its own: a browser leaves threads and handlers behind.
BROWSER = r"""
import json, sys
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtGui import QGuiApplication
from PyQt6.QtWebEngineCore import QWebEnginePage

page_path, script, out_path = sys.argv[1:]
app = QGuiApplication([sys.argv[0]])
found = {"console": []}

class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):
        found["console"].append(message)

def loaded(ok):
    found["loaded"] = ok
    page.runJavaScript(script, done)

def done(value):
    found["dom"] = json.loads(value)
    app.quit()

page = Page()
page.loadFinished.connect(loaded)
page.setUrl(QUrl.fromLocalFile(page_path))
QTimer.singleShot(90_000, app.quit)
app.exec()
del page
with open(out_path, "w") as out:
    json.dump(found, out)
"""

SCRIPT = r"""
const shown = e => e.getBoundingClientRect().width > 0 && e.getBoundingClientRect().height > 0;
const nodes = [...document.querySelectorAll('li[data-end]')];
const [counters, ...namespaces] = document.querySelectorAll('details');
const table = counters.querySelector('table');
const out = {
  title: document.title,
  head: document.querySelector('h1').textContent,
  resources: performance.getEntriesByType('resource').length,
  nodes: nodes.map(n => [n.title, n.querySelector('code').textContent, shown(n)]),
  kinds: nodes.map(n => n.className),
  colors: nodes.map(n => getComputedStyle(n).color),
  indents: nodes.map(n => n.getBoundingClientRect().left),
  namespaces: namespaces.map(n => n.querySelector('summary').textContent),
  bold: document.querySelectorAll('b').length,
  table: [counters.open],
};
counters.querySelector('summary').click();
out.table.push(counters.open, shown(table), table.rows.length);
namespaces[0].querySelector('summary').click();
const rest = [...namespaces[0].querySelectorAll('li')];
out.collapsed = rest.filter(n => n.checkVisibility()).length;
namespaces[0].querySelector('summary').click();
out.expanded = rest.filter(n => n.checkVisibility()).length;
JSON.stringify(out)
"""


def open_in_browser(page: Path, script: str, folder: Path) -> dict[str, Any]:
    out = folder / "found.json"
    env = {
        **os.environ,
        "QT_QPA_PLATFORM": "offscreen",
        "QTWEBENGINE_DISABLE_SANDBOX": "1",  # it cannot be had as root, and the page is our own
        "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu",
        "XDG_RUNTIME_DIR": str(folder),
        "HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", BROWSER, str(page), script, str(out)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert out.exists(), f"the browser ended with {done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_the_page_is_whole_in_a_real_browser(tmp_path: Path) -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2)
    config = KVConfig(dtype="model", page_size=4, capacity=64 * 4 * 16, pin_share=1.0)
    cache = PrefixCache(spec, config, backend="torch")
    sequences: list[tuple[list[int], Any]] = [
        ([1, 2, 3, 4, 5, 6, 7, 8], None),
        ([1, 2, 3, 4, 9, 9, 9], None),
        ([1, 2, 3, 4, 9, 9, 9, 9, 5], None),
        ([7, 7], "<b>bold</b>&'\""),
    ]
    for token_ids, namespace in sequences:
        with cache.acquire(token_ids, namespace=namespace) as lease:
            rows = torch.ones(len(token_ids) - lease.num_cached, 1, 2)
            lease.write(0, rows, rows)
            lease.commit()
    with cache.pin([1, 2, 3, 4, 5, 6, 7, 8]):
        cache.to_html(tmp_path / "tree.html")
    found = open_in_browser(tmp_path / "tree.html", SCRIPT, tmp_path)
    assert found["loaded"] is True
    assert found["console"] == []
    dom = found["dom"]
    assert dom["title"] == "radixkv cache"
    assert dom["head"].startswith("model cache: 4 nodes, 15 tokens")
    assert dom["resources"] == 0  # nothing is loaded from elsewhere
    assert dom["nodes"] == [
        ["tokens 0 to 4 of a sequence", "1 2 3 4", True],
        ["tokens 4 to 8 of a sequence", "5 6 7 8", True],
        ["tokens 4 to 9 of a sequence", "9 9 9 9 5", True],
        ["tokens 0 to 2 of a sequence", "7 7", True],
    ]
    assert dom["kinds"] == ["pinned", "pinned", "", ""]
    assert len(set(dom["colors"])) == 2  # what is pinned looks different
    assert dom["indents"][0] < dom["indents"][1] == dom["indents"][2]
    assert dom["namespaces"][0] == "no namespace 13 tokens, 4 pages"
    assert dom["namespaces"][1].startswith("""namespace '<b>bold</b>&\\'"' 2 tokens""")
    assert dom["bold"] == 0  # a namespace is text, whatever it is called
    assert dom["table"][:3] == [False, True, True]
    assert dom["table"][3] == len(cache.stats().__dataclass_fields__) - 1
    assert (dom["collapsed"], dom["expanded"]) == (0, 3)
