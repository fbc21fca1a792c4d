"""What benchmarks print: numbers in suitable units, tables, sections of a page. Nothing is measured here."""

from bench.page import duration, table, with_section


def test_durations_have_a_suitable_unit() -> None:
    shown = [duration(s) for s in (142.3, 8.31, 0.0512, 0.000131, 3.4e-7, None)]
    assert shown == ["142 s", "8.31 s", "51.2 ms", "131 µs", "340 ns", "–"]


def test_a_table_is_markdown() -> None:
    assert table(["a", "bc"], [["one", "2"]]).splitlines() == ["| a   | bc |", "|-----|----|", "| one | 2  |"]


def test_a_section_replaces_the_old_one_and_leaves_the_others() -> None:
    page = "# Page\n\nfirst\n\n## Measured\n\nold\n\n## More\n\nlast\n"
    assert with_section(page, "## Measured\n\nnew\n") == "# Page\n\nfirst\n\n## Measured\n\nnew\n\n## More\n\nlast\n"
    assert with_section(page, "# Page\n\nnew") == "# Page\n\nnew\n\n## Measured\n\nold\n\n## More\n\nlast\n"
    assert with_section(page, "## Other\n\nnew") == f"{page}\n## Other\n\nnew\n"
    assert with_section("", "# Page\n") == "# Page\n"
