"""What stands beside the code: how to contribute, changes, citation, locked versions, related work,
slides. That they agree with the code, the logs and each other."""
import os
import re
import subprocess
from textwrap import indent

import pytest

from kvcache import EVICT

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def numbers(text):
    return set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", text))


def test_every_requirement_is_locked_at_a_version_that_it_allows():
    locked = dict(re.findall(r"^([\w-]+)==([\w.]+)", read("requirements-locked.txt"), re.M))
    lines = read("requirements.txt").splitlines()
    for line in lines:
        name, least = re.match(r"([\w-]+)(?:>=([\d.]+))?", line).groups()
        version, least = ([int(x) for x in v.split(".")] for v in (locked[name], least or "0"))
        assert version >= least, line
    assert len(lines) == 6


def test_the_lint_that_is_named_is_the_one_that_is_run():
    version = re.search(r"ruff==([\d.]+)", read("pyproject.toml"))[0]
    for page in ("CONTRIBUTING.md", ".ci/run"):
        assert version in read(page)


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    cff = yaml.safe_load(read("CITATION.cff"))
    project = dict(re.findall(r'^(version|license) = "(.*)"$', read("pyproject.toml"), re.M))
    assert {key: cff[key] for key in ("version", "license")} == project
    assert {"cff-version", "message", "title", "authors"} <= set(cff)
    paper = cff["preferred-citation"]
    bibtex = re.sub(r"[{}]|\n +", " ", read("docs/related.md").split("```bibtex")[1])
    for author in paper["authors"]:
        assert "{family-names}, {given-names}".format(**author) in bibtex
    assert all(word in re.sub(" +", "", bibtex) for word in paper["title"].split())
    assert paper["url"].rpartition("/")[2] in bibtex


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", ".github/ISSUE_TEMPLATE/eviction_method.md"])
def test_a_new_method_is_asked_for_as_the_methods_are(page):
    text = read(page)
    assert "SMD_METHODS=ideas:loudest python -m pytest -k loudest" in text
    assert "--evict=ideas:loudest --eval_evict=ideas:loudest" in text
    assert "loudest" not in EVICT


def test_the_template_has_what_a_form_needs():
    _, head, body = read(".github/ISSUE_TEMPLATE/eviction_method.md").split("---\n", 2)
    assert re.findall("^(.*?):", head, re.M) == ["name", "about", "title", "labels"]
    scope = {}
    exec(body.split("```python\n")[1].split("```")[0], scope)  # what is asked for is a function
    assert scope["loudest"].__code__.co_varnames == ("q", "k", "e", "elsewhere")


def test_changes_name_commits_and_go_back_in_time():
    text = read("CHANGELOG.md")
    days = [int(day) for day in re.findall(r"^## (\d+) November 2026$", text, re.M)]
    assert days == sorted(days, reverse=True) and len(days) > 3
    named = re.findall(r"(?<=[( ])[0-9a-f]{7}(?=[,) ])", text)
    assert len(named) > 30
    git = ["git", "-C", ROOT, "cat-file", "--batch-check"]
    if not os.path.exists(os.path.join(ROOT, ".git")):
        pytest.skip("a copy without its history")
    asked = "\n".join([*named, "0000000"]) + "\n"
    told = subprocess.run(git, input=asked, capture_output=True, text=True).stdout.splitlines()
    if any("missing" in line for line in told[:-1]) and os.path.exists(
            os.path.join(ROOT, ".git", "shallow")):
        pytest.skip("a copy with a part of its history")
    assert [line.split()[1] for line in told] == ["commit"] * len(named) + ["missing"]


def test_related_work_names_its_sources_and_claims_nothing_as_the_first():
    text = read("docs/related.md").split("\n## Cite\n")[0]
    sections = text.split("\n## ")[1:]
    assert len(sections) == 12
    for section in sections:
        title, _, body = section.partition("\n\n")
        assert "](https://" in body and "\n\n" not in body.strip(), title  # one paragraph
        assert re.search(r"20(24|25|26)|version", body), title             # with a date
    assert "Nothing below is new with this project" in text.split("\n## ")[0]


# slides

def slides():
    _, head, *rest = re.split(r"^---\n", read("docs/slides/deck.md"), flags=re.M)
    assert "marp: true" in head
    return rest


def test_a_slide_holds_one_idea():
    for slide in slides():
        shown, comment = slide.split("<!--")
        assert len(re.findall(r"^# |^## ", shown, re.M)) == 1, shown
        assert shown.count("![") <= 1 and comment.strip().endswith("-->")
        prose = [line for line in shown.splitlines() if not line.startswith(("    ", "|"))]
        assert len(" ".join(prose).split()) <= 50, shown
        for path in re.findall(r"\]\((.*?)\)", shown):
            assert os.path.exists(os.path.join(ROOT, "docs", "slides", path)), path


def test_the_page_of_the_slides_counts_them():
    page, count = read("docs/slides/README.md"), len(slides())
    rows = re.findall(r"^\| (\d+) to (\d+), .*? \| (\d+) \|", page, re.M)
    numbered = [n for first, last, _ in rows for n in range(int(first), int(last) + 1)]
    assert numbered == [*range(1, count + 1)]
    assert sum(int(minutes) for *_, minutes in rows) == 45
    assert f"{count} slides" in page and "45 minutes" in page


def test_numbers_of_slides_stand_on_the_pages_that_the_logs_hold():
    pages = [read(name) for name in ("README.md", "docs/results.md", "docs/lesson.md")]
    known, shown = numbers("\n".join(pages)), numbers("\n".join(slides()))
    assert len(shown) > 20 and shown <= known, shown - known
    assert not {"0.7812", "0.2195"} & known  # control: not any number stands there
    table = re.search(r"```\n(row  token.*?)```", pages[0], re.S)[1]  # that by hand
    assert any(indent(table, "    ") in slide for slide in slides())
