"""Checks in a table: what each found, what to do about it, and what that makes the exit code."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PASS, FAIL, SKIP, ERROR = "PASS", "FAIL", "SKIP", "NOT RUN"
_COLOURS = {PASS: "green", FAIL: "red", SKIP: "dim", ERROR: "yellow"}


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    what: str
    remedy: str
    setting: str | None = None
    """The config's setting to change."""


class NotApplicable(Exception):
    """There is nothing to check; says why."""


@dataclass(frozen=True)
class Result:
    """What became of a check."""

    check: str
    status: str
    """One of ``PASS``, ``FAIL``, ``SKIP`` where there is nothing to check, ``NOT RUN`` where
    there is, but it could not be checked."""
    detail: str
    remedy: str = ""
    setting: str | None = None


Check = Callable[[], "Finding | str"]
"""Looks at one thing, and returns what is wrong with it, or a sentence on what it saw."""


def run_checks(checks: dict[str, Check]) -> list[Result]:
    """Run checks by their names, in order; what goes wrong in one is its result."""
    results = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        for name, check in checks.items():
            progress.update(task, description=name)
            results.append(_run(name, check))
    return results


def _run(name: str, check: Check) -> Result:
    try:
        found = check()
    except NotApplicable as reason:
        return Result(name, SKIP, str(reason))
    # whatever keeps a check from its answer: it must not count as passed, nor stop the others
    except Exception as error:
        return Result(name, ERROR, f"{type(error).__name__}: {error}")
    if isinstance(found, Finding):
        return Result(name, FAIL, found.what, found.remedy, found.setting)
    return Result(name, PASS, found)


def exit_code(results: list[Result]) -> int:
    """Return 1 if something was found, 2 if nothing was but a check could not run, else 0."""
    statuses = {result.status for result in results}
    return 1 if FAIL in statuses else 2 if ERROR in statuses else 0


def table_of(results: list[Result], title: str) -> Table:
    """Lay results out for the terminal."""
    table = Table("", "", "", title=title, box=SIMPLE, show_header=False)
    first_with: dict[str, str] = {}
    for result in results:
        colour = _COLOURS[result.status]
        detail = result.detail
        # what keeps one check from running often keeps others, too
        if result.status == ERROR and first_with.setdefault(detail, result.check) != result.check:
            detail = f"as {first_with[detail]}"
        table.add_row(result.check, f"[{colour}]{result.status}[/{colour}]", escape(detail))
    return table


def summary_of(results: list[Result]) -> str:
    """Count results, so that what did not run is not taken for passed."""
    counts = {
        status: sum(result.status == status for result in results)
        for status in (PASS, FAIL, ERROR, SKIP)
    }
    return (
        f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[ERROR]} could not run, "
        f"{counts[SKIP]} had nothing to check"
    )
