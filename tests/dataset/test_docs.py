"""The examples of the page on the data path give what it says."""

import doctest
import re
from pathlib import Path

from mmengine.logging import MMLogger

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_examples_of_the_page_are_right(monkeypatch):
    # the log goes to stdout, which is what an example prints
    monkeypatch.setattr(MMLogger, "callHandlers", lambda self, record: None)
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.MULTILINE)
    page = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(page.examples) > 20
    assert doctest.DocTestRunner().run(page).failed == 0
