"""Whether a picture can be drawn where it was asked for, known before the work is done."""

import os
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase


def check_picture(path: Path) -> None:
    """Check that matplotlib can write a file.

    Args:
        path: Of a picture that need not be there.

    Raises:
        ValueError: It has no suffix of a picture, or cannot be written.
    """
    suffixes = [f".{name}" for name in FigureCanvasBase.get_supported_filetypes()]
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"--png must end with one of {', '.join(suffixes)}, got {str(path)!r}")
    target = path if path.exists() else path.parent
    is_right_kind = path.is_file() if path.exists() else path.parent.is_dir()
    if not (is_right_kind and os.access(target, os.W_OK)):
        raise ValueError(
            f"--png must be a file in a folder that can be written, got {str(path)!r}; name "
            "another one"
        )
