"""The files for an operator: what they name exists, and the tools that read them accept them."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT
from trimtab.cli.commands.serve import DEFAULTS
from trimtab.cli.main import parser
from trimtab.serve.observe.metrics import Metrics

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "trimtab.service").read_text("utf-8")


# What Prometheus adds to every series, and what a histogram's buckets have.
SCRAPED, BUCKET = {"instance", "job"}, {"le"}


def exposed():
    """Return the labels of every name that a server's metrics may have."""
    names = {}
    for collector in Metrics().registry._collector_to_names:
        labels = set(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + end: labels for end in ends}
    return names


def queries():
    """Return every query of the dashboard's panels with its legend."""
    board = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    return [(target["expr"], target["legendFormat"]) for panel in board["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_one_of_the_servers():
    board = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    texts += [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    named = {name for text in texts for name in re.findall(r"\b((?:trimtab|process)_\w+)", text)}
    assert len(named) > 18 and named <= exposed().keys() | {"process_resident_memory_bytes"}
    variables = {one["name"] for one in board["templating"]["list"]}
    assert {name for text in texts for name in re.findall(r"\$(\w+)", text)} <= variables | {"__rate_interval"}
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in board["panels"]}) == len(places)


@pytest.mark.parametrize("query, legend", queries())
def test_every_label_of_the_dashboard_is_one_of_its_metric(query, legend):
    known = {"process_resident_memory_bytes": set()} | exposed()
    metrics = set(re.findall(r"\b((?:trimtab|process)_\w+)", query))
    for metric, matchers in re.findall(r"\b(\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)=~", matchers)) <= known[metric] | SCRAPED
        metrics.remove(metric)
    assert not metrics, "a metric without matchers shows the series of other jobs and servers"
    labels = set.union(*(known[metric] for metric in re.findall(r"\b(\w+)\{", query))) | SCRAPED
    kept = labels
    for names in re.findall(r"\bby \(([^)]*)\)", query):
        kept = set(names.split(", "))
        assert kept <= labels | (BUCKET if "_bucket" in query else set())
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept - BUCKET


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not here")
def test_prometheus_reads_every_query_of_the_dashboard(tmp_path):
    texts = [query.replace("$__rate_interval", "1m") for query, _ in queries()]
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    found = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and f"{len(rules)} rules found" in found.stdout, found.stderr


def test_the_unit_starts_a_command_that_there_is():
    (command,) = re.findall(r"^ExecStart=\S+/trimtab (.+)$", UNIT, re.M)
    options = parser().parse_args(command.split())
    assert options.config == "/etc/trimtab/serve.toml"
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)[0]) > DEFAULTS["grace"]
    for limit in ("MemoryMax", "TasksMax", "LimitNOFILE", "LimitMEMLOCK", "ExecReload"):
        assert f"\n{limit}=" in UNIT


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_accepts_the_unit(tmp_path):
    # Its own paths are not on this machine; everything else is read.
    text = re.sub(r"^(ExecStart|ExecReload)=\S+", r"\1=/bin/true", UNIT, flags=re.M)
    unit = tmp_path / "trimtab.service"
    unit.write_text(re.sub(r"^(User|Group|WorkingDirectory)=.*\n", "", text, flags=re.M))
    found = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert [line for line in (found.stdout + found.stderr).splitlines() if "trimtab.service" in line] == []


def test_what_the_dockerfile_copies_is_here_and_its_command_too():
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
    (entry,), (command,) = re.findall(r"^ENTRYPOINT (\[.+\])$", text, re.M), re.findall(r"^CMD (\[.+\])$", text, re.M)
    assert parser().parse_args([*json.loads(entry)[1:], *json.loads(command)]).config
    assert re.search(r"^USER trimtab$", text, re.M)
    # torch of the lock, by its pinned number.
    assert re.search(r"^torch==[0-9.]+", (ROOT / "locks" / "newest.txt").read_text("utf-8"), re.M)
    # Without the lock pip takes the newest torch, which no test has run with.
    (install,) = re.findall(r"^RUN pip install (.+) /source$", text, re.M)
    assert install == "--constraint /source/locks/newest.txt"


def test_the_dockerfile_in_the_docs_copies_what_is_here_and_runs_a_command():
    page = (ROOT / "docs" / "docker.md").read_text("utf-8")
    (text,) = re.findall(r"```dockerfile\n(.*?)```", page, re.DOTALL)
    words = [line.split(maxsplit=1) for line in re.sub(r" *\\\n *", " ", text).splitlines() if line]
    assert {word for word, _ in words} == {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert [rest for word, rest in words if word == "FROM"] == ["python:3.12-slim AS built", "python:3.12-slim"]
    told = dict(words)
    assert told["USER"] == "trimtab" and "useradd --create-home --uid 10001 trimtab" in text
    assert parser().parse_args([*json.loads(told["ENTRYPOINT"])[1:], *json.loads(told["CMD"])]).name_of_command == "demo"
    (lock,) = re.findall(r"--constraint (\S+)", text)
    assert (ROOT / lock).is_file() and f"!{lock}" in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    # `docker run IMAGE WORDS` of the image in deploy/ starts a server.
    served = re.findall(r"^docker run .* trimtab:cuda (.+)$", page, re.M)
    assert [parser().parse_args(["serve", *one.split()]).model for one in served] == ["demo"]


def test_the_lock_pins_every_dependency_of_the_image():
    lock = (ROOT / "locks" / "newest.txt").read_text("utf-8")
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", lock, re.M)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [Requirement(text) for text in project["dependencies"]]
    assert {canonicalize_name(one.name) for one in needed if one.marker is None} <= pinned


def test_compose_builds_both_images_and_its_yaml_is_read():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert {name: one["profiles"] for name, one in found["services"].items()} == {"cpu": ["cpu"], "gpu": ["gpu"]}
    for one in found["services"].values():
        assert (ROOT / one["build"]["dockerfile"]).is_file()
        assert one["read_only"] and one["cap_drop"] == ["ALL"] and one["ports"] == ["127.0.0.1:8000:8000"]
        assert int(one["stop_grace_period"].removesuffix("s")) > DEFAULTS["grace"]
        # An image in OCI's format has no health check of its own.
        (check,) = re.findall(r"^HEALTHCHECK .*\n +CMD (\[.+\])$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.M)
        assert one["healthcheck"]["test"] == ["CMD", *json.loads(check)]


def test_a_build_is_sent_what_it_copies_and_nothing_else():
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M) for name in line.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == copied and lines.index("*") < lines.index("**/__pycache__")
