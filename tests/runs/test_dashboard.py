import json
import re

import pytest

from pipeswift_lightning.runs.dashboard import dashboard
from pipeswift_lightning.runs.run_folder import RunFolder, find_runs
from tests.drawing.browser import CHROMIUM, Browser
from tests.drawing.test_drawing import Structure
from tests.runs.folders import STEPS, report, write_run, write_sweep


def content(text: str):
    (line,) = [line for line in text.split("\n") if line.startswith("const data = ")]
    return json.loads(line.removeprefix("const data = ").removesuffix(";"))


def test_the_page_holds_the_runs_and_nothing_from_elsewhere(tmp_path) -> None:
    write_sweep(tmp_path)
    text = dashboard(find_runs([tmp_path]), title="a <sweep>")
    tags = Structure(text).tags
    assert not any({"src", "srcset"} & attributes.keys() for _, attributes in tags)
    assert [a["href"] for _, a in tags if "href" in a] == ["data:,"]
    assert "a &lt;sweep&gt;" in text
    data = content(text)
    assert [run["name"] for run in data["runs"]] == ["0", "1", "2", "3"]
    assert [run["choices"] for run in data["runs"]][:2] == [
        "strategy.micro_batches=4",
        "strategy.micro_batches=8",
    ]
    assert data["runs"][3]["error"] == "OptionError: 64 > <8>"  # escaped within the script
    assert "<8>" not in text
    facts = data["runs"][1]["facts"]
    assert (facts["step, ms"], facts["bubble"], facts["tokens/s"]) == ("120.0", "25.0%", "1,234")


def test_long_series_are_thinned_but_keep_both_ends(tmp_path) -> None:
    points = [(step, step / 7) for step in range(5000)]
    run = RunFolder(path=tmp_path, name="long", series={"train/loss": points})
    kept = content(dashboard([run], title="long"))["runs"][0]["series"]["train/loss"]
    assert len(kept) == 400
    assert (kept[0], kept[-1]) == ([0, 0.0], [4999, 714.143])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("stages", [4, 64])
def test_dashboard_in_a_browser(tmp_path, stages) -> None:
    """Curves are drawn, hover tells values, zoom moves all diagrams, and nothing is loaded."""
    write_sweep(tmp_path / "sweep", stages)
    page = tmp_path / "dashboard.html"
    page.write_text(dashboard(find_runs([tmp_path / "sweep"]), title="a sweep"))
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(f"file://{page}")
        check_table_and_bars(browser)
        check_hover_and_zoom(browser, stages)
        check_timeline(browser, stages)
        assert browser.picture().startswith(b"\x89PNG")
    finally:
        browser.close()
    assert browser.requests() == [f"file://{page}"]
    assert browser.complaints() == []


def place(browser: Browser, selector: str) -> tuple[float, float]:
    """Scroll to an element; return its middle."""
    expression = f"""(() => {{
        const element = document.querySelector({selector!r});
        element.scrollIntoView({{ block: "center" }});
        const r = element.getBoundingClientRect();
        return [r.x + r.width / 2, r.y + r.height / 2];
    }})()"""
    x, y = browser.value(expression)
    return x, y


def tip(browser: Browser) -> str:
    return browser.value("getComputedStyle(tip).display + ' ' + tip.textContent")


def check_table_and_bars(browser: Browser) -> None:
    assert browser.value("document.querySelectorAll('#runs tr').length") == 5
    assert browser.value("document.querySelector('td.least').textContent") == "11.0 (least)"
    assert browser.value("document.querySelectorAll('#bars [data-part=training]').length") == 3
    browser.mouse("mouseMoved", *place(browser, "#bars [data-part=assembly]"))
    assert re.fullmatch(
        r"block 0\nassembly: 5.00 s, 31.3 %\n  process start 3.00 s\n  groups 2.00 s", tip(browser)
    )


def check_hover_and_zoom(browser: Browser, stages: int) -> None:
    assert browser.value("charts.length") == 3  # loss, measured bubble, bubble by stage
    assert browser.value("document.querySelectorAll('.curve').length") == 3 + 3 + 3 * stages
    x, y = place(browser, ".chart svg")
    browser.mouse("mouseMoved", x, y)
    head, *lines = tip(browser).split("\n")
    step = int(head.removeprefix("block step "))
    assert step in (40, 50)  # those nearest to the middle
    assert lines == [f"{run}  train/loss  {1 / (step + 1):.4g}" for run in range(3)]
    whole = browser.value("view")
    assert whole == [STEPS[0], STEPS[-1]]
    curve = "charts[2].picture.querySelector('.curve').getAttribute('d')"
    before = browser.value(curve)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert browser.value("view[1]") == pytest.approx(0.8 * whole[1])
    assert browser.value(curve) != before  # the other diagrams move too
    start = browser.value("view[0]")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + 40, y, button="left")
    browser.mouse("mouseReleased", x + 40, y, button="left", clickCount=1)
    assert browser.value("view[0]") < start
    for _ in range(2):
        browser.mouse("mousePressed", x, y, button="left", clickCount=2)
        browser.mouse("mouseReleased", x, y, button="left", clickCount=2)
    assert browser.value("view") == whole
    browser.value("document.querySelector('#runs input').click()")
    assert browser.value("document.querySelectorAll('.curve').length") == 2 + 2 + 2 * stages
    browser.value("document.querySelector('#runs input').click()")


def check_timeline(browser: Browser, stages: int) -> None:
    """The run's own timeline lies within the page, and can still be pointed at."""
    inner = "document.querySelector('iframe').contentDocument"
    browser.wait_for(f"{inner} && {inner}.querySelectorAll('rect').length")
    assert browser.value(f"{inner}.querySelectorAll('rect.forward').length") == 4 * stages
    left, top = browser.value(
        "(() => { const f = document.querySelector('iframe'); f.scrollIntoView({ block: 'start' });"
        f"const a = f.getBoundingClientRect(), b = {inner}.querySelector('rect.backward')"
        ".getBoundingClientRect(); return [a.x + b.x + b.width / 2, a.y + b.y + b.height / 2]; })()"
    )
    browser.mouse("mouseMoved", left, top)
    told = browser.value(f"{inner}.getElementById('tip').textContent")
    assert re.match(r"backward\nstage \d+\nmicro-batch \d", told)


def test_a_single_run_needs_no_table_of_others(tmp_path) -> None:
    write_run(tmp_path, ["seed=1", "trainer=cpu"], report(12.0, 8))
    data = content(dashboard(find_runs([tmp_path]), title="one"))
    assert data["runs"][0]["choices"] == "seed=1 trainer=cpu"
