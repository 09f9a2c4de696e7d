"""What the README shows can be done."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_shows_rounding_only(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    exec(compile(example, "README.md", "exec"), {})
    difference = float(re.search(r"tensor\(([\d.e-]+)", capsys.readouterr().out)[1])
    assert difference < 1e-5


def test_every_page_and_file_that_it_names_exists():
    text = README.read_text()
    names = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"python (\S+\.py)", text)
    assert len(names) > 5
    missing = [name for name in names if not (README.parent / name).exists()]
    assert missing == []
