"""Statistics of the newest values."""

LENGTH = 4


class Window:
    """Mean and median of the last LENGTH values."""

    def __init__(self):
        self.values = []

    def add(self, value):
        self.values = [*self.values, value][-LENGTH:]

    def mean(self):
        return sum(self.values) / len(self.values)

    def median(self):
        ordered, middle = sorted(self.values), len(self.values) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return (ordered[middle - 1] + ordered[middle]) / 2
