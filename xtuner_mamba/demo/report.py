"""What the demo found: numbers, what must hold of them, a table and a picture."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

# the share of the loss at the start that must be gone at the end
CLEAR_FALL = 0.1
# how many times smaller boundaries must make the difference to one document at a time
CLEAR_GAIN = 1000


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """Numbers of one run."""

    documents: int
    tokens: int
    packs: int
    num_split: int
    """Documents that are longer than a pack."""
    utilisation: float
    padding: float
    """Share of padding, had the documents been padded in random batches of 16."""
    tokens_per_second: float
    loss_start: float
    loss_end: float
    difference: float
    """Largest difference between logits of packs and of one document at a time."""
    difference_without_boundaries: float
    leaks: int
    """Documents that changed when another one did."""
    leaks_without_boundaries: int

    def failures(self) -> list[str]:
        """Say what is not as it must be."""
        messages = []
        if not self.loss_end < (1 - CLEAR_FALL) * self.loss_start:
            messages.append(
                f"the loss must fall by {CLEAR_FALL:.0%}, got {self.loss_start:.3f} at the start "
                f"and {self.loss_end:.3f} at the end"
            )
        if not self.difference * CLEAR_GAIN < self.difference_without_boundaries:
            messages.append(
                "packed logits must equal those of one document at a time, got a difference of "
                f"{self.difference:.1e} ({self.difference_without_boundaries:.1e} without "
                "boundaries)"
            )
        if self.leaks:
            messages.append(f"no document may change another one, got {self.leaks} changed")
        if not self.leaks_without_boundaries:
            messages.append("the leak test must be able to fail, got no leak without boundaries")
        return messages

    def write(self, path: Path) -> None:
        """Write the numbers as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        """Lay the numbers out for the terminal."""
        table = Table("", "", title="Mamba on packed documents", show_header=False)
        verdict = "FAIL" if self.leaks or not self.leaks_without_boundaries else "PASS"
        rows = {
            "documents": f"{self.documents:,} ({self.num_split} longer than a pack, split)",
            "tokens": f"{self.tokens:,}",
            "packs": f"{self.packs:,}",
            "packing utilisation": f"{self.utilisation:.2%}",
            "padding, had they been padded": f"{self.padding:.1%}",
            "training speed": f"{self.tokens_per_second:,.0f} tokens/s",
            "loss, start to end": f"{self.loss_start:.2f} -> {self.loss_end:.2f}",
            "packed against one by one": f"logits differ by {self.difference:.1e} at most",
            "the same without boundaries": f"{self.difference_without_boundaries:.1e}",
            "leak test": (
                f"{verdict} ({self.leaks} changed, {self.leaks_without_boundaries} without "
                "boundaries)"
            ),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def plot(losses: list[tuple[int, float]], lengths: list[int], path: Path) -> None:
    """Draw the loss over training and the histogram of document lengths.

    Args:
        losses: Iteration and loss.
        lengths: Tokens of each document as packed.
        path: PNG file to write.
    """
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(*zip(*losses, strict=True))
    left.set(xlabel="pack", ylabel="loss a token", title="Loss")
    bins = np.geomspace(1, max(lengths), 40)
    right.hist(lengths, bins=bins)
    right.set(xscale="log", xlabel="tokens", ylabel="documents", title="Document lengths")
    figure.savefig(path, dpi=150)
    plt.close(figure)
