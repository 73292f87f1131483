"""Does the page of formats have the table that the records and the tests make?"""

from tools.which_files import PAGE, filled
from trimtab.gguf.architectures import ARCHITECTURES


def test_the_page_has_the_table_of_formats_that_the_records_make():
    assert (text := PAGE.read_text(encoding="utf-8")) == filled(text), "run python tools/which_files.py"


def test_the_page_beside_other_servers_counts_the_architectures_of_gguf():
    count = ("five", "six", "seven", "eight")[len(ARCHITECTURES) - 5]
    assert f"GGUF of {count} architectures" in (PAGE.parent / "beside-other-servers.md").read_text(encoding="utf-8")
