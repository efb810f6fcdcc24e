import html
import json
import re

from jlade.evaluation.report import Table

TABLE = Table(
    "times",
    "Times",
    {"method": "", "tokens/step": ".2f", "speedup": ".1f x", "dtype": ""},
    (("plain", 1.0, 2.345, "float32"), ("15, 5, 15", float("nan"), None, None), ("auto", 2, float("inf"), "bfloat16")),
    "Run `jlade bench` again.",
)


def test_markdown():
    assert TABLE.markdown() == (
        "**Times**\n"
        "\n"
        "| method | tokens/step | speedup | dtype |\n"
        "| --- | ---: | ---: | --- |\n"
        "| plain | 1.00 | 2.3x | float32 |\n"
        "| 15, 5, 15 | - | - | - |\n"
        "| auto | 2.00 | - | bfloat16 |\n"
        "\n"
        "Run `jlade bench` again.\n"
    )


def test_markdown_without_a_note_and_with_rules_and_lines_in_names():
    table = Table("a", "A", {"a|b": ""}, (("c|d\ne",),))
    assert table.markdown() == "**A**\n\n| a\\|b |\n| --- |\n| c\\|d e |\n"


def test_json_has_the_numbers_and_none_for_those_that_it_cannot_hold():
    assert json.loads(json.dumps(TABLE.facts(), allow_nan=False)) == {
        "name": "times",
        "title": "Times",
        "note": "Run `jlade bench` again.",
        "rows": [
            {"method": "plain", "tokens/step": 1.0, "speedup": 2.345, "dtype": "float32"},
            {"method": "15, 5, 15", "tokens/step": None, "speedup": None, "dtype": None},
            {"method": "auto", "tokens/step": 2, "speedup": None, "dtype": "bfloat16"},
        ],
    }


def test_html_aligns_text_to_the_left():
    written = TABLE.html()
    assert "<th class=text>method</th><th>tokens/step</th>" in written
    assert "<td class=text>plain</td><td>1.00</td><td>2.3x</td><td class=text>float32</td>" in written
    assert "<p class=note>Run <code>jlade bench</code> again.</p>" in written
    assert "note" not in Table("a", "A", TABLE.columns, TABLE.rows).html()


def test_html_shows_markup_as_text():
    evil = '<script>alert(`1`)</script> & "quotes" ${title} $title'
    written = Table("a", "A", {evil: ""}, ((evil,),), evil).html()
    assert re.findall("<(script|/script)", written) == []
    assert html.unescape(re.sub("<[^>]*>", "|", written)).count("<script>alert(") == 3
