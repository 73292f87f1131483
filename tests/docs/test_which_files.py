"""Does the page of formats have the table that the records and the tests make?"""

from __future__ import annotations

from tools.which_files import PAGE, filled


def test_the_page_has_the_table_of_formats_that_the_records_make():
    assert (text := PAGE.read_text(encoding="utf-8")) == filled(text), "run python tools/which_files.py"
