"""Closed intervals of whole numbers."""

APART = 1


def merge(intervals):
    """Overlapping or touching intervals as one, in order; those at most APART apart touch."""
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1] + APART:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
