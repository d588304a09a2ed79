"""What is made to stay is left out of every search for garbage."""

import gc

from prime_hpc.cluster.garbage import lasting


def test_no_search_looks_at_what_lasts():
    with lasting():
        assert not gc.isenabled()
        kept = [[number] for number in range(10)]
    passing = [[number] for number in range(10)]
    assert gc.isenabled()
    searched = set(map(id, gc.get_objects()))
    assert searched.isdisjoint(map(id, kept)) and searched.issuperset(map(id, passing))
