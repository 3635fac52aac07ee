"""The page at /ui: without a browser its files, headers and endpoints; with one what it shows of a running service, and its buttons."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator
from importlib import resources

import httpx
import pytest
import yaml

from tests.conftest import PROJECT
from tests.runtime.gateway.browser import Browser, browsing
from tests.runtime.live_service import Live, live
from tests.runtime.rollout.rollout_parts import KEY as ROLLOUT_KEY
from tests.runtime.rollout.rollout_parts import QUICK, bundle, evaluation

KEY = "a-key-that-nobody-guesses"
EVIL = '<img src=x onerror="document.title=1">'
EVIL_GROUP = "<b>pair</b>"
FILES = {entry.name: entry.read_text() for entry in resources.files("runtime.gateway").joinpath("ui").iterdir()}
AUTHORISED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """An emulated pair, a single card, a parked one like it, and a foreign server that nobody runs; names
    that would be markup where they could."""
    folder = tmp_path_factory.mktemp("page")
    cluster = yaml.safe_load((PROJECT / "envs" / "scenario" / "clusters" / "unlike-3.yaml").read_text())
    cluster["groups"][0]["name"] = EVIL_GROUP
    cluster["groups"].append({"name": "foreign", "ranks": [{"gpu": "L4", "node": "other"}], "outer_link": "ethernet-10g"})
    spare = {"name": "spare", "ranks": [{"gpu": "L4", "node": "spare"}], "outer_link": "ethernet-10g", "parked": True}
    cluster["groups"].append(spare)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGE_TEST_KEYS", KEY)
        with live(
            folder, cluster="cluster.yaml", model={"name": EVIL}, api_keys_env="PAGE_TEST_KEYS",
            groups={"foreign": {"kind": "openai_http", "url": "http://127.0.0.1:9"}},
        ) as service:  # fmt: skip
            for count in (3, 6):
                body = {"model": EVIL, "messages": [{"role": "user", "content": "a secret"}], "max_tokens": count}
                assert httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=AUTHORISED, timeout=60.0).status_code == 200
            yield service


# --- without a browser -----------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_served_without_a_key(service):
    """Each with a policy that lets nothing in but this service's own files."""
    page = httpx.get(f"{service.url}/ui", timeout=60.0)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for name in FILES:
        answer = httpx.get(f"{service.url}/ui/{name}", timeout=60.0)
        assert answer.status_code == 200 and answer.text == FILES[name]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(f"{service.url}/ui/{name}", headers={"if-none-match": answer.headers["etag"]}, timeout=60.0)
        assert again.status_code == 304 and not again.content
    for name in ("nothing.js", "..%2fpage.py", "%2e%2e/page.py", "page.py"):
        assert httpx.get(f"{service.url}/ui/{name}", timeout=60.0).status_code == 404


def test_the_files_refer_to_themselves_alone():
    """No foreign host, nothing inline that the policy would bar, and no way in which a name could become markup."""
    named = set()
    for name, text in FILES.items():
        for address in re.findall(r"https?://[^\s\"')]+", text):
            assert address == "http://www.w3.org/2000/svg", (name, address)
        named |= set(re.findall(r"/ui/([\w.]+)", text)) | set(re.findall(r"from '\./([\w.]+)'", text))
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", text), name
            assert not re.search(r"localStorage|sessionStorage|document\.cookie|indexedDB", text), name  # the key is kept nowhere
    html = FILES["index.html"]
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", html)
    assert named == set(FILES) - {"index.html"}


def test_the_files_are_part_of_the_package():
    patterns = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["runtime.gateway"]
    assert all(any(fnmatch.fnmatch(f"ui/{name}", pattern) for pattern in patterns) for name in FILES)


@pytest.mark.parametrize("path", ["/admin/state", "/admin/requests"])
def test_what_the_page_shows_is_behind_the_key(service, path):
    assert httpx.get(service.url + path, timeout=60.0).status_code == 401
    assert httpx.get(service.url + path, headers={"authorization": "Bearer wrong"}, timeout=60.0).status_code == 401
    assert httpx.get(service.url + path, headers=AUTHORISED, timeout=60.0).status_code == 200


def test_last_requests_tell_where_the_time_went_and_nothing_of_the_text(service):
    said = httpx.get(f"{service.url}/admin/requests", headers=AUTHORISED, timeout=60.0)
    assert "secret" not in said.text and said.headers["cache-control"] == "no-store"
    newest, oldest = said.json()["requests"][0], said.json()["requests"][-1]
    assert newest["at_s"] > oldest["at_s"] and newest["output_tokens"] <= 6 and newest["status"] == 200
    (attempt,) = newest["answers"][0]["attempts"]
    assert attempt["outcome"] == "ok" and attempt["group"] in (EVIL_GROUP, "solo-l4")
    assert sum(attempt["parts"].values()) == pytest.approx(attempt["queue_s"] + attempt["prefill_s"] + attempt["decode_s"], rel=1e-6)
    assert 0.0 < newest["ttft_s"] <= newest["took_s"]
    assert attempt["began_s"] + attempt["took_s"] <= newest["took_s"] + 1e-3


# --- in a browser ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, service: Live) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1280, 1000)
        yield browser


@pytest.fixture
def page(browser: Browser, service: Live) -> Browser:
    """The page with the key in use."""
    browser.open(f"{service.url}/ui")
    browser.logs()
    use_key(browser, KEY)
    browser.wait(lambda: browser.text(".card h3"), "no group is shown")
    return browser


def use_key(browser: Browser, key: str) -> None:
    browser.type("#key", key)
    browser.click("#key-form button")


def card(name: str) -> str:
    return f'.card[aria-label="Group {name}"]'


def test_the_page_asks_for_the_key_and_keeps_it_in_memory_alone(browser, service):
    browser.open(f"{service.url}/ui")
    browser.wait(lambda: "give one above" in browser.text("#trouble"), "the page does not ask for the key")
    assert browser.text("#group-cards") == ""
    use_key(browser, "wrong")
    browser.wait(lambda: "not known here" in browser.text("#trouble"), "the page takes a wrong key")
    use_key(browser, KEY)
    browser.wait(lambda: browser.text(".card h3"), "the page shows nothing with the right key")
    assert browser.text("#trouble") == ""
    kept = browser.run(
        "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, document.body.outerHTML])"
    )
    assert KEY not in kept
    browser.open(f"{service.url}/ui")
    browser.wait(lambda: "give one above" in browser.text("#trouble"), "the key outlived the page")


def test_the_page_shows_groups_requests_decisions_and_breakers(page):
    assert EVIL_GROUP in page.text("#group-cards")
    pair = page.text(card("solo-l4"))
    for word in ("EMULATION", "serving", "Running", "Waiting", "KV", "Compute", "Heads", "MLP", "Vocabulary", "L4"):
        assert word in pair, word
    assert "EMULATION" in page.text("#emulation")
    page.wait(lambda: page.run("return document.querySelectorAll('.waterfall li').length") >= 2, "no request is shown")
    shown = page.run("return [...document.querySelectorAll('.water')].map(node => node.getAttribute('aria-label'))")
    assert any("decode" in label and "prefill" in label for label in shown)
    page.run("document.querySelector('.decision').open = true")
    decision = page.text(".decision")
    for word in ("route", "heuristic", "no_policy", "Net", "solo-l4"):
        assert word in decision, word
    breakers = page.text("#breaker-rows")
    assert "forced open" in breakers and "not started" in breakers and "closed" in breakers and "chat" in breakers
    assert "rolls out no policy" in page.text("#rollout-body")
    missing = [line for line in page.logs() if "/admin/rollout" not in line and "401" not in line]
    assert missing == []


def test_a_foreign_group_says_what_is_possible(page):
    said = page.text(card("foreign"))
    assert "only routing and requeue are possible" in said and "vLLM" in said
    assert page.run(f"return document.querySelector('{card('foreign')} select').hidden")
    assert "EMULATION" not in said


def test_names_are_text_and_never_markup(page):
    """A model's and a group's name that would run a script if they were inserted as markup."""
    assert page.text("#service-model") == EVIL
    assert page.run("return document.images.length") == 0 and page.run("return document.querySelectorAll('#group-cards b').length") == 0
    assert page.run("return document.title") == f"Ballast: {EVIL}"


def test_drain_and_undrain(page, service):
    names = [backend.name for backend in service.service.dispatcher.backends]
    g = names.index("solo-l4")
    page.click(f"{card('solo-l4')} .actions button")
    page.wait(lambda: page.run("return document.querySelector('dialog').open"), "the page does not ask back")
    page.click("dialog button[value=no]")
    assert not service.do(lambda: bool(service.service.dispatcher.telemetry.is_draining[g]))
    page.click(f"{card('solo-l4')} .actions button")
    page.click("dialog button[value=yes]")
    page.wait(lambda: "Undrain" in page.text(f"{card('solo-l4')} .actions"), "the group does not drain")
    assert service.do(lambda: bool(service.service.dispatcher.telemetry.is_draining[g]))
    page.wait(lambda: not page.run("return document.querySelector('dialog').open"), "the question stays")
    page.click(f"{card('solo-l4')} .actions button")
    page.wait(lambda: "serving" in page.text(f"{card('solo-l4')} .card-head"), "the group does not come back")


def test_re_split(page, service):
    """The mixed pair is asked for an even split: half of the heads each."""
    page.run("const s = document.querySelector(arguments[0] + ' select'); s.value = 'even'", card(EVIL_GROUP))
    page.click(f"{card(EVIL_GROUP)} .actions button:nth-of-type(2)")
    page.click("dialog button[value=yes]")
    page.wait(lambda: "Split even" in page.text(card(EVIL_GROUP)), "the split does not change", 20.0)
    heads = page.run("return document.querySelector(arguments[0] + ' .plan .stack').getAttribute('aria-label')", card(EVIL_GROUP))
    assert heads == "Heads: rank 0: 16, rank 1: 16"
    page.wait(lambda: "set_split" in page.text("#move-rows") and "operator" in page.text("#move-rows"), "the move is not shown")


def test_join(page, service):
    """The parked card's rank joins the single card; afterwards its own card offers nothing."""
    assert (
        page.run("return [...document.querySelectorAll('.card button')].filter(node => node.textContent === 'Join' && !node.hidden).length")
        == 1
    )
    offered = page.run("return [...document.querySelectorAll(arguments[0] + ' select')].at(-1).innerText", card("spare"))
    assert "solo-l4" in offered and "foreign" not in offered
    page.run("const s = [...document.querySelectorAll(arguments[0] + ' select')].at(-1); s.value = 'solo-l4'", card("spare"))
    page.click(f"{card('spare')} .actions button:last-of-type")
    page.wait(lambda: "join solo-l4" in page.text("dialog"), "the page does not ask back")
    page.click("dialog button[value=yes]")
    page.wait(lambda: "its ranks serve in solo-l4" in page.text(card("spare")), "the ranks do not join", 30.0)
    assert page.run("return [...document.querySelectorAll(arguments[0] + ' .actions > *')].every(node => node.hidden)", card("spare"))
    heads = "return document.querySelector(arguments[0] + ' .plan .stack').getAttribute('aria-label')"
    page.wait(lambda: "rank 1" in page.run(heads, card("solo-l4")), "the merged group does not show both ranks", 20.0)
    page.wait(lambda: "regroup" in page.text("#move-rows"), "the move is not shown")


def test_it_fits_a_telephone_and_a_desk_in_light_and_dark(page, tmp_path):
    grounds = set()
    try:
        for width in (400, 1280):
            for scheme in ("light", "dark"):
                page.resize(width, 900)
                page.prefers(scheme)
                assert page.run("return document.documentElement.scrollWidth") <= width
                grounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        page.screenshot(tmp_path / "page.png")
    finally:
        page.resize(1280, 1000)
    assert len(grounds) == 2


def test_everything_that_can_be_worked_has_a_name(page):
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, select, [role=meter], [role=img], section, article')].filter(node => "
        "!(node.getAttribute('aria-label') || node.getAttribute('aria-labelledby') || node.labels?.length || node.textContent.trim()))"
        ".map(node => node.outerHTML)"
    )
    assert nameless == []
    contrasts = page.run(CONTRASTS)
    assert min(contrasts.values()) >= 4.5, contrasts  # WCAG 2.2, level AA


def test_a_rollout_is_shown_and_rolled_back(browser, tmp_path):
    """A real one, begun in shadow: its stage, gates and log; the button asks back, and the incumbent decides alone again."""
    made = bundle(tmp_path / "made")
    file = evaluation(tmp_path / "evaluation.json", made, key=ROLLOUT_KEY)
    (tmp_path / "key").write_bytes(ROLLOUT_KEY)
    settings = QUICK | {"dir": "state", "evidence_key_file": "key", "automatic": False}
    with live(tmp_path, rollout=settings) as service:
        order = {"bundle": str(made), "evaluation": str(file)}
        begun = httpx.post(f"{service.url}/admin/rollout/start", json=order, timeout=60.0)
        assert begun.status_code == 200, begun.text
        browser.open(f"{service.url}/ui")
        browser.wait(lambda: "shadow" in browser.text("#rollout-body"), "the stage is not shown")
        said = browser.text("#rollout-body")
        assert "Passed" in said and "canary" in said and "made" in said and "net_utility" in said
        assert browser.run("return document.querySelector('[aria-current=step]').textContent") == "shadow"
        browser.click("#rollout-body button.danger")
        browser.click("dialog button[value=yes]")
        browser.wait(lambda: "rolled back" in browser.text("#rollout-body"), "it is not rolled back")
        assert httpx.get(f"{service.url}/admin/rollout", timeout=60.0).json()["stage"] == "rolled_back"


CONTRASTS = """
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((value) => value / 255).map(
    (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
  return 'rgb(255, 255, 255)';
};
const found = {};
const selectors = 'h1 h3 .meter-label .kind .pill.good .pill.emulated .pill.bad .empty td th .note .legend footer';
for (const selector of selectors.split(' ')) {
  const node = document.querySelector(selector);
  if (!node) continue;
  const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
  found[selector] = (a + 0.05) / (b + 0.05);
}
return found;
"""
