"""A small cache."""

from collections import OrderedDict

ROOM = 3


class Cache:
    """Keeps the ROOM entries that were used last."""

    def __init__(self):
        self.entries = OrderedDict()

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key, value):
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > ROOM:
            self.entries.popitem(last=False)
