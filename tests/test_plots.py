"""What a figure shows of its data where a few values are far from the rest."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from helpers import plots


@pytest.mark.parametrize("sink", [1.0, 1000.0])
def test_a_sink_does_not_take_the_colours_of_all_other_tokens(sink: float) -> None:
    mass = np.linspace(1.0, 2.0, 4 * 500).reshape(4, 500)
    mass[:, 0] *= sink
    figure = plots.mass_by_head(mass, "title")
    norm = figure.axes[0].images[0].norm
    assert (norm.vmin, norm.vmax) == pytest.approx((mass.min(), 2.0), rel=0.02)
    plt.close(figure)
