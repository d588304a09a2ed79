import unittest

from intervals import APART, merge


class Tests(unittest.TestCase):
    def test_touching_intervals_are_one(self):
        self.assertEqual(merge([(0, 1), (1 + APART, 20)]), [(0, 20)])

    def test_an_interval_within_another_is_lost(self):
        self.assertEqual(merge([(0, 50), (3, 4)]), [(0, 50)])

    def test_order_does_not_matter(self):
        self.assertEqual(merge([(90, 95), (0, 1)]), [(0, 1), (90, 95)])


if __name__ == "__main__":
    unittest.main()
