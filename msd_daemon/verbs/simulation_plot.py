"""Draws a prediction as one picture of four panels, SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from federation.simulation.simulation import Prediction
from msd_daemon.verbs.figures import new_figure, save_figure

LINES_MAX = 12
"""Sources drawn one by one; of more the largest, and the rest as a sum."""


def write_plots(prediction: Prediction, folder: Path) -> list[Path]:
    """Write `simulation.svg` and `simulation.png` and return their paths.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    figure = new_figure(12, 8)
    axes = figure.subplots(2, 2)
    _draw_mixture(axes[0, 0], prediction)
    _draw_balance(axes[0, 1], prediction)
    _draw_epochs(axes[1, 0], prediction)
    _draw_traffic(axes[1, 1], prediction)
    return save_figure(figure, folder, "simulation")


def _draw_mixture(axis: Any, prediction: Prediction) -> None:
    counts = prediction.drawn_tokens if prediction.unit != "samples" else prediction.drawn_samples
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    realised = counts / totals
    order = np.argsort(-prediction.wanted.sum(axis=0), kind="stable")
    shown, rest = order[:LINES_MAX], order[LINES_MAX:]
    for source in shown.tolist():
        lines = axis.plot(100 * realised[:, source], label=prediction.sources[source], linewidth=1)
        axis.plot(100 * prediction.wanted[:, source], ":", color=lines[0].get_color(), linewidth=1)
    if len(rest):
        axis.plot(100 * realised[:, rest].sum(axis=1), label=f"{len(rest)} more", linewidth=1)
    axis.set(title="mixture (dotted: wanted)", xlabel="step", ylabel=f"% of {prediction.unit}")
    axis.legend(fontsize="x-small", ncols=2)


def _draw_balance(axis: Any, prediction: Prediction) -> None:
    axis.plot(prediction.imbalance, label="slowest rank / mean cost", linewidth=1)
    if prediction.has_encoders:
        axis.plot(prediction.encoder_imbalance, label="slowest encoders / mean", linewidth=1)
    axis.plot(prediction.speedup_over_native, label="time in native order / time", linewidth=1)
    axis.plot(1 + prediction.padding, label="1 + padding", linewidth=1)
    axis.set(title="balance and padding", xlabel="step")
    axis.legend(fontsize="x-small")


def _draw_epochs(axis: Any, prediction: Prediction) -> None:
    order = np.argsort(-prediction.epochs, kind="stable")[: 2 * LINES_MAX]
    axis.barh([prediction.sources[source] for source in order.tolist()], prediction.epochs[order])
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set(title="how often each source was gone through", xlabel="epochs")


def _draw_traffic(axis: Any, prediction: Prediction) -> None:
    axis.plot(prediction.crossing_bytes / 1e6, label="MB between nodes", linewidth=1)
    axis.plot(prediction.carried_tokens / 1e6, label="million tokens carried", linewidth=1)
    axis.set(title="between nodes, and carried to later steps", xlabel="step")
    axis.legend(fontsize="x-small")
