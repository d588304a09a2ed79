import unittest

from cache import ROOM, Cache


class Tests(unittest.TestCase):
    def test_it_keeps_so_many(self):
        cache = Cache()
        for i in range(20):
            cache.put(i, i)
        self.assertEqual([i for i in range(20) if cache.get(i) is not None], list(range(20 - ROOM, 20)))

    def test_what_was_read_is_kept(self):
        cache = Cache()
        for i in range(ROOM):
            cache.put(i, i)
        cache.get(0)
        cache.put("new", 1)
        self.assertEqual((cache.get(0), cache.get(1)), (0, None))


if __name__ == "__main__":
    unittest.main()
