"""What a check of a node found."""

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The verdict of one check on one node, with what it saw in a few words."""

    check: str
    fit: bool
    words: str
