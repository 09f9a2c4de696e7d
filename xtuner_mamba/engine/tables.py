"""Tables for the log."""

from io import StringIO

from rich.console import Console
from rich.table import Table

_WIDTH = 100


def table_text(table: Table) -> str:
    """Return a table as lines of text, without colours."""
    text = StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return text.getvalue()
