import gzip
import json
import re
import struct
import sys
from html.parser import HTMLParser

import pytest

from pipeswift_lightning.drawing import (
    DrawingError,
    Panel,
    chrome_trace,
    page,
    png,
    write_chrome_trace,
)
from pipeswift_lightning.plan.costs import Link, StepCosts
from pipeswift_lightning.plan.schedules import one_f_one_b
from pipeswift_lightning.plan.simulator import simulate
from pipeswift_lightning.plan.timeline import Event, EventKind, Timeline
from tests.drawing.browser import CHROMIUM, Browser


def panels(num_stages: int = 3, num_micro_batches: int = 4) -> list[Panel]:
    costs = StepCosts.uniform(num_stages, num_micro_batches, forward_s=0.01, backward_s=0.02)
    schedule = one_f_one_b(num_stages, num_micro_batches)
    measured = simulate(schedule, costs, link=Link(latency_s=0.001)).shifted(100.0)
    update = Event(0, 0, None, EventKind.OPTIMIZER, measured.end_s, measured.end_s + 0.005)
    loading = Event(1, 1, None, EventKind.DATA_WAIT, 99.98, 99.99)
    measured = Timeline((*measured.events, update, loading), num_stages)
    samples = tuple(range(1, 1 + num_micro_batches))
    return [
        Panel("measured", measured, samples, tuple(100 * n for n in samples)),
        Panel("predicted <ideal>", simulate(schedule, costs)),
    ]


class Structure(HTMLParser):
    """Open tags, by name; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))


def test_page_holds_every_event_and_nothing_from_elsewhere() -> None:
    drawn = panels()
    text = page(drawn, title="step <1>")
    tags = Structure(text).tags
    rects = [attributes for tag, attributes in tags if tag == "rect"]
    assert len(rects) == sum(len(p.timeline.events) for p in drawn)
    first = next(r for r in rects if r["class"] == "forward")
    assert (first["x"], first["width"], first["data-m"]) == ("0.0", "10000.0", "0")
    assert next(r for r in rects if r["class"] == "data_wait")["x"] == "-20000.0"
    assert "step &lt;1&gt;" in text
    assert "predicted &lt;ideal&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert not any({"src", "srcset"} & attributes.keys() for _, attributes in tags)
    assert [a["href"] for _, a in tags if "href" in a] == ["data:,"]
    assert "default-src 'none'" in text
    told = page([Panel("sized", drawn[0].timeline, (3, 1, 2, 2), (9, 4, 7, 6))], title="sizes")
    assert told.count(' data-m="0" data-samples="3" data-tokens="9"') == sum(
        e.micro_batch == 0 for e in drawn[0].timeline.events
    )
    assert "data-tokens" not in page([Panel("sized", drawn[0].timeline, (3, 1, 2, 2))], title="")
    for kind in ("forward", "backward", "receive wait", "optimizer", "data wait"):
        assert f"</i>{kind}</span>" in text


def test_trace_has_a_slice_an_event_and_an_arrow_a_message(tmp_path) -> None:
    drawn = panels()
    write_chrome_trace(tmp_path / "t.json.gz", drawn)
    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert trace == chrome_trace(drawn)
    records = trace["traceEvents"]
    slices = [r for r in records if r["ph"] == "X"]
    assert len(slices) == sum(len(p.timeline.events) for p in drawn)
    starts = {r["id"]: r for r in records if r["ph"] == "s"}
    ends = {r["id"]: r for r in records if r["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * (2 * 2 * 4)  # panels, directions, edges, micro-batches

    def enclosing(record):
        return [
            s["name"]
            for s in slices
            if (s["pid"], s["tid"]) == (record["pid"], record["tid"])
            and s["ts"] <= record["ts"] < s["ts"] + s["dur"]
        ]

    for number, start in starts.items():
        end = ends[number]
        assert enclosing(start) == enclosing(end)  # F2 on one stage, F2 on the next
        assert end["tid"] - start["tid"] == (1 if start["name"] == "activation" else -1)
        assert end["ts"] > start["ts"]
    held = {s["args"].get("tokens", 0) - 100 * s["args"].get("samples", 0) for s in slices}
    assert held == {0}
    assert sum("tokens" in s["args"] for s in slices if s["pid"] == 0) == sum(
        e.micro_batch is not None for e in drawn[0].timeline.events
    )
    names = {r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert names == {"stage 0", "stage 1", "stage 2"}


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(4, 8), (64, 16)])
def test_png_of_few_and_of_many_stages(num_stages, num_micro_batches) -> None:
    pytest.importorskip("matplotlib")
    picture = png(panels(num_stages, num_micro_batches), dpi=60)
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 14 * 60
    assert 150 < height < 1100


def test_a_picture_of_nothing_can_be_drawn() -> None:
    empty = [Panel("empty", Timeline((), 2))]
    assert "stage 1" in page(empty, title="none")
    assert [r["ph"] for r in chrome_trace(empty)["traceEvents"]] == ["M"] * 4
    pytest.importorskip("matplotlib")
    assert png(empty, dpi=40).startswith(b"\x89PNG")


def test_without_matplotlib_the_remedy_is_told(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DrawingError, match=r"Rule: .*pip install 'pipeswift-lightning\[plot\]'"):
        png(panels())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(4, 8), (64, 16)])
def test_page_in_a_browser(tmp_path, num_stages, num_micro_batches) -> None:
    """Hover says what a box is, zoom and keys change what is seen, and nothing is loaded."""
    (tmp_path / "t.html").write_text(page(panels(num_stages, num_micro_batches), title="step 1"))
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(f"file://{tmp_path}/t.html")
        whole = browser.value("view")
        assert whole == browser.value("whole")
        # 64 rows are too many for labels within boxes, but not for the stages' names.
        labels = browser.value("document.querySelectorAll('.labels span').length")
        assert labels > 10 if num_stages == 4 else labels == 0
        rows = "[...document.querySelectorAll('.names div')].map(d => d.clientHeight)"
        assert min(browser.value(rows)) >= 11
        left, top, width, height = browser.value(
            "(r => [r.x, r.y, r.width, r.height])"
            "(document.querySelectorAll('rect.backward')[1].getBoundingClientRect())"
        )
        x, y = left + width / 2, top + height / 2
        browser.mouse("mouseMoved", x, y)
        tip = browser.value("getComputedStyle(tip).display + ' ' + tip.textContent")
        found = re.fullmatch(
            r"block backward\nstage \d+\nmicro-batch (\d+), samples: (\d+), tokens: (\d+)\n"
            r"[\d.]+ ms to [\d.]+ ms\nlasts 20.000 ms",
            tip,
        )
        assert found is not None, tip
        number, samples, tokens = map(int, found.groups())
        assert (samples, tokens) == (number + 1, 100 * (number + 1))
        for _ in range(3):
            browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
        start, length = browser.value("view")
        assert length == pytest.approx(whole[1] * 0.8**3)
        assert browser.value("document.querySelectorAll('svg')[1].viewBox.baseVal.x") == (
            pytest.approx(start, rel=1e-4)
        )
        browser.mouse("mousePressed", x, y, button="left", clickCount=1)
        browser.mouse("mouseMoved", x + 50, y, button="left")
        browser.mouse("mouseReleased", x + 50, y, button="left", clickCount=1)
        assert browser.value("view[0]") < start
        browser.press("0")
        assert browser.value("view") == whole
        browser.press("+")
        assert browser.value("view[1]") == pytest.approx(whole[1] * 0.8)
        assert browser.picture().startswith(b"\x89PNG")
    finally:
        browser.close()
    assert browser.requests() == [f"file://{tmp_path}/t.html"]
    assert browser.complaints() == []
