"""The page's files, routes and policy, without a browser: what is sent, what is not, and that its parts fit together."""

import hashlib
import re
from html.parser import HTMLParser

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests import ROOT
from tests.rules import each
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http import page

VOID = {"meta", "link", "input", "br", "hr", "img"}
# What is ours: the other script is compared with what its project published.
SCRIPTS = sorted(name for name in page.ASSETS if name.endswith(".js") and name != page.VENDORED)
OURS = sorted(name for name in page.ASSETS if name != page.VENDORED and not name.endswith("LICENSE.txt"))
SHEETS = ("page.css", "chat.css")
MARKDOWN_IT_SHA256 = "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30"  # of 15.0.3


def client(**settings):
    return TestClient(Starlette(routes=page.page_routes(Settings(**settings))))


def text_of(name):
    return (page.FOLDER / name).read_text(encoding="utf-8")


class Read(HTMLParser):
    """A page as its tags, ids and labels; what is not closed in order is a problem."""

    def __init__(self, text):
        super().__init__()
        self.open, self.problems, self.ids, self.tags = [], [], [], []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.problems.append(f"<{tag}> has an attribute twice")
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing at {self.getpos()}")


@pytest.fixture(scope="module")
def index():
    return Read(text_of(page.INDEX))


# Routes ---------------------------------------------------------------------------------------------------------------


@each("name", sorted(page.ASSETS))
def test_every_asset_is_sent_as_what_it_is(name):
    answer = client().get(f"/page/{name}")
    assert answer.status_code == 200 and answer.headers["content-type"] == page.ASSETS[name]
    assert answer.content == (page.FOLDER / name).read_bytes()


def test_the_page_is_at_the_root():
    answer = client().get("/")
    assert answer.content == (page.FOLDER / page.INDEX).read_bytes() and answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("name", ["page.py", "..%2Fpage.py", "%2e%2e/settings.py", "index.html/../../app.py", "PAGE.CSS", ""])
def test_what_is_not_an_asset_is_not_there(name):
    assert client().get(f"/page/{name}").status_code == 404


def test_no_file_is_left_off_the_list():
    files = {path.relative_to(page.FOLDER).as_posix() for path in page.FOLDER.rglob("*") if path.is_file()}
    assert {name for name in files if not name.startswith((".", "_"))} == set(page.ASSETS)


def test_settings_without_the_page_have_no_routes():
    assert page.page_routes(Settings(page=False)) == []


def test_only_reading_is_allowed():
    assert client().post("/").status_code == 405


def test_a_known_version_is_not_sent_again():
    found = client()
    tag = found.get("/page/page.js").headers["etag"]
    again = found.get("/page/page.js", headers={"if-none-match": tag})
    assert again.status_code == 304 and again.content == b""
    assert found.get("/page/page.css").headers["etag"] != tag


def test_about_says_whether_adapters_can_be_loaded(tmp_path):
    assert client().get("/page/about.json").json()["loads_adapters"] is False
    found = client(adapter_root=tmp_path).get("/page/about.json")
    assert found.json()["loads_adapters"] is True and str(tmp_path) not in found.text


# Policy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/page/about.json", "/page/none"])
def test_every_answer_carries_the_policy(path):
    headers = client().get(path).headers
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"] and "http" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_the_page_has_nothing_that_the_policy_would_refuse(index):
    for tag, attributes in index.tags:
        assert "style" not in attributes, f"<{tag}> has a style of its own"
        assert not [name for name in attributes if name.startswith("on")], f"<{tag}> has a handler of its own"
        assert tag != "style"
        if tag == "script":
            assert attributes["src"].startswith("/page/")


@each("name", OURS)
def test_nothing_comes_from_elsewhere(name):
    found = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", text_of(name)))
    # The name of a language, which nobody asks for.
    assert found <= {"http://www.w3.org/2000/svg"}


@each("name", SCRIPTS)
def test_data_never_becomes_html_or_code(name):
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in text_of(name)


@each("name", SCRIPTS)
def test_the_key_is_kept_in_the_tab_alone(name):
    stored = re.findall(r"localStorage\.setItem\(\s*([^,]+),", text_of(name))
    # KEPT is the name of the options and of the open drawers.
    assert set(stored) <= {'"trimtab-theme"', "KEPT"}
    assert "document.cookie" not in text_of(name)


def test_the_reader_of_markdown_is_what_its_project_published():
    assert hashlib.sha256((page.FOLDER / page.VENDORED).read_bytes()).hexdigest() == MARKDOWN_IT_SHA256
    licence = text_of("markdown-it.LICENSE.txt")
    assert "markdown-it 15.0.3" in licence
    # The packages that are bundled in it have theirs.
    for name in ("entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"):
        assert f"== {name}@" in licence
    assert licence.count("Permission is hereby granted") >= 4


def test_the_reader_of_markdown_takes_no_html():
    script = text_of("markdown.js")
    assert "html: false" in script and "innerHTML" not in script and ".render(" not in script


# The parts fit together -----------------------------------------------------------------------------------------------


def test_the_html_is_well_formed(index):
    assert index.problems == [] and len(index.ids) == len(set(index.ids))


@each("name", SCRIPTS)
def test_every_id_that_a_script_uses_is_in_the_page(name, index):
    text = text_of(name)
    used = set(re.findall(r'byId\("([^"]+)"\)', text)) | set(re.findall(r'getElementById\("([^"]+)"\)', text))
    assert used <= set(index.ids)


def test_ids_in_lists_are_in_the_page_too(index):
    # Where a script goes over ids, they stand in a list of texts before `byId(id)`.
    lists = re.findall(r"for \(const (?:id|name|\[\w+, \w+\]) of \[(.+?)\]\) \{", "".join(map(text_of, SCRIPTS)))
    lists += re.findall(r"const (?:NUMBERS|TEXTS|CHECKS) = \[(.+?)\]", text_of("options.js"))
    named = {word for found in lists for word in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', found)}
    assert {"top-p", "max-tokens", "state-text", "load-dialog"} <= named and named <= set(index.ids)


def test_every_style_of_a_script_is_in_the_sheet():
    sheet = "".join(map(text_of, SHEETS))
    for name in SCRIPTS:
        for classes in re.findall(r'class: "([a-z -]+)"', text_of(name)):
            for one in classes.split():
                assert f".{one}" in sheet, f"{name}: {one}"


def test_every_imported_name_is_exported():
    for name in SCRIPTS:
        used = re.findall(r'import (?:\{([^}]+)\}|\* as \w+) from "\./([^"]+)"', text_of(name))
        assert all(source in page.ASSETS for _, source in used)
        for names, source in [one for one in used if one[0]]:
            exported = set(re.findall(r"export (?:async )?(?:function\*?|class|const|let) (\w+)", text_of(source)))
            assert {one.strip() for one in names.split(",")} <= exported


def test_children_that_are_not_there_are_left_out_in_one_place():
    # replaceChildren(null) writes "null": outside dom.js, `make` and `refill` fill elements.
    for name in SCRIPTS:
        if name != "dom.js":
            assert re.findall(r"\.replaceChildren\((?!\))", text_of(name)) == [], name


def test_every_control_has_a_label(index):
    labelled = {attributes["for"] for tag, attributes in index.tags if tag == "label"}
    for tag, attributes in index.tags:
        if tag in ("select", "textarea", "progress") or (tag == "input" and "hidden" not in attributes):
            assert attributes["id"] in labelled, attributes
    described = [attributes["aria-describedby"] for _, attributes in index.tags if "aria-describedby" in attributes]
    named = [attributes["aria-labelledby"] for _, attributes in index.tags if "aria-labelledby" in attributes]
    assert set(described) | set(named) <= set(index.ids) and labelled <= set(index.ids)


def test_every_drawing_that_is_used_is_in_the_page(index):
    text = "".join(map(text_of, [*SCRIPTS, page.INDEX]))
    used = set(re.findall(r'icon\("(\w+)"\)|tool\("(\w+)"|#i-(\w+)"', text))
    names = {name for found in used for name in found if name} | {"done", "close"}
    assert len(names) > 15 and {f"i-{name}" for name in names} <= set(index.ids)


def test_patterns_and_styles_of_the_picture_match(index):
    script, sheet = text_of("picture.js"), text_of("page.css")
    fills = re.search(r"const PATTERNED = \[(.+?)\]", script)
    assert fills is not None
    names = re.findall(r'"(\w+)"', fills[1])
    assert "stream" in names
    for name in [*names, "other"]:
        assert f".fill-{name} {{" in sheet
    assert set(re.findall(r"url\(#([\w-]+)\)", sheet)) <= set(index.ids)


# The wheel ------------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_page():
    # hatchling is what builds the wheel; the list it makes is asked for, and nothing is built.
    pytest.importorskip("hatchling")
    from hatchling.builders.wheel import WheelBuilder

    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"trimtab/serve/http/page/{name}" for name in page.ASSETS} <= packed
