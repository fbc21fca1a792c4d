"""The ends of a bar in a timeline, without the gap that is drawn after wide bars."""

from labkit.plots.timeline import GAP_PX


def ends_of(ax, corners):
    """Left and right end of a bar in units of the axis, given the corners of its polygon."""
    left, right = corners[:, 0].min(), corners[:, 0].max()
    px = ax.get_window_extent().width / (ax.get_xlim()[1] - ax.get_xlim()[0])
    return left, right + GAP_PX / px * ((right - left) * px > 5 - GAP_PX)
