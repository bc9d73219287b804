"""Questions to a front, and what it is written as."""

import dataclasses
import html.parser
import itertools
import json

import pytest

import nc
from nc.errors import ConfigError, NCWarning, StateError
from nc.tuning.front import Front, FrontPoint, rank_correlation
from nc.tuning.trials import Result


def point(name, metric, ms, size=100, estimated=None):
    result = Result(
        metric=metric, sqnr_db=30.0, fp32_ratio=10 / ms, ms=ms, spread=(1.0, 1.1), weight_bytes=size
    )
    drop = 0.9 - metric
    return FrontPoint(name=name, config=nc.StaticQuantConfig(), result=result, drop=drop, estimated=estimated)


POINTS = (
    point("fp32", 0.9, 10, 400),
    point("fast", 0.8, 2, 90),
    point("good", 0.89, 4, 110),
    point("worse", 0.7, 5, 50),
)
FRONT = Front(measured=POINTS, rank_correlation=0.75, notes=("a <note>",))


def test_points_that_no_other_one_beats():
    assert [p.name for p in FRONT.points] == ["fast", "good", "fp32"]


@pytest.mark.parametrize(
    ("drop", "fastest", "smallest"), [(0, "fp32", "fp32"), (0.02, "good", "good"), (0.5, "fast", "worse")]
)
def test_what_loses_at_most_so_much(drop, fastest, smallest):
    assert FRONT.fastest(max_drop=drop).name == fastest
    assert FRONT.smallest(max_drop=drop).name == smallest


@pytest.mark.parametrize(("ms", "name"), [(2, "fast"), (4.5, "good"), (100, "fp32")])
def test_the_most_accurate_in_a_time(ms, name):
    assert FRONT.most_accurate(max_ms=ms).name == name


def test_where_none_meets_a_budget_the_nearest_is_given_and_said():
    with pytest.warns(NCWarning, match=r"No measured point meets max_ms=1\. The nearest is 'fast'"):
        assert FRONT.most_accurate(max_ms=1).name == "fast"


def test_bad_questions():
    for call in (
        lambda: FRONT.fastest(max_drop=-1),
        lambda: FRONT.fastest(max_drop=float("nan")),
        lambda: FRONT.most_accurate(max_ms="5"),
        lambda: FRONT.smallest(max_drop=True),
    ):
        with pytest.raises(ConfigError, match="expected a number"):
            call()
    with pytest.raises(StateError, match="Nothing was measured"):
        Front(measured=()).fastest(max_drop=1)
    with pytest.raises(StateError, match="Nothing was measured"):
        Front(measured=()).save("front.html")


def test_whether_it_is_monotone():
    def of(*metrics):
        points = (point(str(i), m, 5, estimated=(0.1 * i, 1.0)) for i, m in enumerate(metrics))
        return Front(measured=tuple(points))

    assert of(0.9, 0.8, 0.7).monotone
    assert not of(0.9, 0.7, 0.8).monotone


def test_ranks_against_the_definition():
    a, b = [3.0, 1.0, 2.0, 5.0], [30.0, 10.0, 20.0, 11.0]
    ranks = [[sorted(x).index(v) for v in x] for x in (a, b)]
    squares = sum((x - y) ** 2 for x, y in zip(*ranks, strict=True))
    assert rank_correlation(a, b) == pytest.approx(1 - 6 * squares / (4 * (16 - 1)))
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 1, 2], [3, 3, 4]) == pytest.approx(1)


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_needs_nothing_else_and_escapes_names(tmp_path):
    front = Front(measured=(*POINTS, point("<script>alert(1)</script>", 0.95, 3)), notes=("a <note>",))
    front.save(tmp_path / "front.html")
    page = _Page()
    page.feed((tmp_path / "front.html").read_text(encoding="utf-8"))
    assert page.links == []
    assert "script" not in page.tags
    assert page.tags.count("circle") == 5
    text = "".join(page.text)
    assert "<script>alert(1)</script>" in text
    assert "a <note>" in text
    assert '"schema_version"' in text


def test_plain_values(tmp_path):
    FRONT.save(tmp_path / "front.json")
    document = json.loads((tmp_path / "front.json").read_text())
    assert document["front"] == ["fast", "good", "fp32"]
    assert nc.StaticQuantConfig.from_dict(document["points"][0]["config"]) == nc.StaticQuantConfig()
    with pytest.raises(ConfigError, match=r"\.html or \.json"):
        FRONT.save(tmp_path / "front.txt")


def test_the_table_has_all_points_and_marks_the_front():
    text = str(FRONT)
    marked = [
        line.split()[1] for line in text.splitlines() if line.startswith("*") and "no other" not in line
    ]
    assert marked == ["fast", "good", "fp32"]
    assert "rank correlation of estimated and measured error 0.75" in text
    result = dataclasses.replace(POINTS[1].result, note="the machine was busy")
    busy = Front(measured=(dataclasses.replace(POINTS[1], result=result),))
    assert "the time of fast is uncertain: the machine was busy" in str(busy)
    assert all(a.name in text for a, _ in itertools.pairwise(POINTS))
