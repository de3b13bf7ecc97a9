"""A picture of a calibration: measured against fitted, a panel for each kind of point."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from serve_table.artifact import write_atomically
from serve_table.calibration import Calibration, Point

MEASURED = "#3b6ea5"
FITTED = "#c8553d"


def write_picture(calibration: Calibration, path: Path) -> None:
    """Draw the four panels into a PNG file; ArtifactError where it cannot be written."""
    figure = Figure(figsize=(11.0, 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _panel(axes[0, 0], calibration, "prefill", "prompt tokens", lambda p: p.prompt_tokens, log=True)
    _panel(axes[0, 1], calibration, "decode", "running sequences", lambda p: p.batch, log=True, parted=True)
    _panel(axes[1, 0], calibration, "interference", "tokens of the local prefill", lambda p: p.prompt_tokens)
    _panel(axes[1, 1], calibration, "handoff", "prompt tokens", lambda p: p.prompt_tokens)
    stretched = f", dilation {calibration.dilation:g} (times divided by it)" if calibration.dilation != 1.0 else ""
    figure.suptitle(
        f"{calibration.model} on {calibration.cluster_kind} "
        f"{calibration.prefill_engines}P+{calibration.decode_engines}D{stretched}: measured and fitted"
    )
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    write_atomically(path, content.getvalue())


TITLES = {
    "prefill": "Prefill: time to the one token of a cold prompt",
    "decode": "Decode: a step of a batch",
    "interference": "Interference: the gap that a local prefill makes",
    "handoff": "Hand-off: decode leg to its first token",
}


def _panel(
    axes: Axes,
    calibration: Calibration,
    kind: str,
    label: str,
    place: Callable[[Point], int],
    log: bool = False,
    parted: bool = False,
) -> None:
    """One kind of point; parted: a line for each context a sequence has."""
    points = [point for point in calibration.points if point.kind == kind]
    axes.set_title(TITLES[kind], fontsize=10)
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    if not points:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        return
    axes.scatter([place(p) for p in points], [p.measured_s * 1e3 for p in points], s=14, color=MEASURED, alpha=0.5)
    groups = sorted({_context(p) for p in points}) if parted else [None]
    for group in groups:
        line = sorted((place(p), p.fitted_s * 1e3) for p in points if group is None or _context(p) == group)
        xs, ys = np.array(line).T
        axes.plot(xs, ys, color=FITTED, linewidth=1.2)
        if group is not None:
            label = f"{group} tokens each"
            axes.annotate(label, (xs[-1], ys[-1]), fontsize=8, ha="right", xytext=(-6, 2), textcoords="offset points")
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if kind == "prefill":
        axes.set_yscale("log")
    axes.legend(["measured", "fitted"], frameon=False, fontsize=8)
    axes.grid(alpha=0.2)


def _context(point: Point) -> int:
    """Context of one sequence, rounded to a digit: points of one plan have few."""
    return int(float(f"{point.context_tokens / max(point.batch, 1):.1g}"))
