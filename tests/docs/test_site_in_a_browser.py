"""The site in a browser, at the width of a screen and of a telephone: nothing is wider than the page, no picture is
missing, and the text of no drawing overlaps or leaves it."""

import contextlib
import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from test_site import MKDOCS, site  # noqa: F401

DOCS = Path(__file__).parents[2] / "docs"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(MKDOCS is None, reason="mkdocs is not installed: `make docs` installs it in .venv-docs"),
    pytest.mark.skipif(BROWSER is None, reason="needs chromium to render the pages"),
]

HARNESS = """<!doctype html><title>running</title><body><script>
const problems = [], frame = document.createElement("iframe");
document.body.append(frame);
function load(width, page) {
  return new Promise(done => { frame.onload = done; frame.style.width = width + "px"; frame.style.height = "900px";
    frame.src = page + "?" + width; });
}
function look(width, page) {
  const inside = frame.contentDocument, root = inside.documentElement;
  if (!inside.querySelector("article")) problems.push([page, width, "no article"]);
  // Code and tables scroll by themselves. The theme may clip what is wider than the page, so look at elements, too.
  const scrolls = ".md-typeset__scrollwrap, pre, .highlight";
  const wide = [...inside.querySelectorAll("article *")].filter(
    e => e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest(scrolls));
  if (root.scrollWidth > root.clientWidth || wide.length)
    problems.push([page, width, `${root.scrollWidth} wide: ` + wide.slice(0, 2).map(e => e.outerHTML.slice(0, 90))]);
  for (const image of inside.images)
    if (!image.complete || image.naturalWidth === 0) problems.push([page, width, "missing picture " + image.src]);
}
(async () => {
  let seen = 0;
  for (const page of PAGES) for (const width of [1280, 400]) { await load(width, page); look(width, page); seen += 1; }
  await fetch("/result", {method: "POST", body: JSON.stringify([seen, problems])});
})();
</script>"""

DRAWING = """<!doctype html><title>x</title><body><div style="width: 860px">SVG</div><script>
const svg = document.querySelector("svg"), all = svg.getBoundingClientRect(), problems = [];
const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
for (const [i, [text, box]] of texts.entries()) {
  const inside = box.left >= all.left && box.right <= all.right && box.bottom <= all.bottom;
  if (!inside) problems.push("leaves the drawing: " + text);
  for (const [other, b] of texts.slice(i + 1))
    if (box.left < b.right - 1 && b.left < box.right - 1 && box.top < b.bottom - 4 && b.top < box.bottom - 4)
      problems.push("overlap: " + text + " / " + other);
}
fetch("/result", {method: "POST", body: JSON.stringify([texts.length, problems])});
</script>"""


class Site(http.server.ThreadingHTTPServer):
    """Serves a folder on this machine only, and receives the result of a page's script."""

    daemon_threads = True

    def __init__(self, folder):
        self.result: queue.Queue[list] = queue.Queue()
        received = self.result

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *given):
                pass

            def do_POST(self):
                received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))

    def look(self, page, profile, seconds):
        """Opens a page in the browser, and returns what its script posts."""
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        flags += "--disable-component-update --disable-sync --force-prefers-reduced-motion --remote-debugging-port=0"
        command = [BROWSER, *flags.split(), f"--user-data-dir={profile}", f"http://127.0.0.1:{self.server_port}{page}"]
        # A session of its own, because the browser is several processes.
        browser = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return self.result.get(timeout=seconds)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


@contextlib.contextmanager
def serving(folder):
    with Site(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def copy(site, tmp_path):  # noqa: F811
    """A copy of the site."""
    return Path(shutil.copytree(site, tmp_path / "site"))


def look_at(copy, pages, seconds):
    (copy / "harness.html").write_text(HARNESS.replace("PAGES", json.dumps(pages)))
    with serving(copy) as server:
        seen, problems = server.look("/harness.html", copy.parent / "profile", seconds)
    assert seen == 2 * len(pages)
    return problems


@pytest.mark.nightly
def test_no_page_is_wider_than_the_window_or_lacks_a_picture(copy):
    pages = sorted(str(path.relative_to(copy)) for path in copy.rglob("index.html"))
    assert len(pages) > 60
    problems = look_at(copy, [f"/{page}" for page in pages], 600)
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.slow
def test_the_landing_page_and_a_planted_mistake(copy):
    page = (copy / "index.html").read_text()
    wide = "</h1><p style='width: 2000px'>wide</p>"
    (copy / "planted.html").write_text(page.replace("images/loss.svg", "images/lost.svg").replace("</h1>", wide, 1))
    problems = look_at(copy, ["/index.html", "/planted.html"], 60)
    assert all(page == "/planted.html" for page, _, _ in problems), problems
    assert [width for _, width, what in problems if "missing picture" in what] == [1280, 400]
    assert any("wide" in what for _, _, what in problems)


@pytest.mark.slow
def test_the_text_of_a_drawing_stays_apart_and_inside(tmp_path):
    (tmp_path / "drawing.html").write_text(DRAWING.replace("SVG", (DOCS / "architecture.svg").read_text()))
    with serving(tmp_path) as server:
        count, problems = server.look("/drawing.html", tmp_path / "profile", 60)
    assert count > 20 and not problems, "\n".join(problems)
