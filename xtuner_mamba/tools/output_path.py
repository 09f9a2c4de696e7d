"""Whether a result can be written, asked before it takes hours to come."""

from collections.abc import Collection
from pathlib import Path


def check_output(option: str, path: Path, suffixes: Collection[str] | None = None) -> None:
    """Refuse a path to which nothing can be written.

    Args:
        option: That names the path.
        path: Of a file, which is left as it is.
        suffixes: Those that tell a format, without the dot; ``None`` where any will do.

    Raises:
        ValueError: The path has none of the suffixes, or no file can be written there.
    """
    if suffixes is not None and path.suffix[1:].lower() not in suffixes:
        raise ValueError(
            f"{option} must end with one of .{', .'.join(sorted(suffixes))}, got {path}; the "
            "ending tells the format"
        )
    is_new = not path.exists()
    try:
        # permissions alone do not tell: not of root, nor of what is mounted read-only
        path.open("ab").close()
    except OSError as error:
        raise ValueError(
            f"{option} must be a file that can be written, got {path}: {error.strerror}; make its "
            "folder, or give another path"
        ) from None
    if is_new:
        path.unlink()


def check_picture(path: Path) -> None:
    """Refuse a path of ``--png`` to which matplotlib cannot write, as :func:`check_output` does."""
    # importing matplotlib takes a second, which --help can do without
    from matplotlib.backend_bases import FigureCanvasBase

    check_output("--png", path, FigureCanvasBase.get_supported_filetypes())
