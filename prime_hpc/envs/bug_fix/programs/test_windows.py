import unittest

from windows import LENGTH, Window


def window_of(*values):
    window = Window()
    for value in values:
        window.add(value)
    return window


class Tests(unittest.TestCase):
    def test_old_values_are_forgotten(self):
        self.assertEqual(window_of(1000, *[7] * LENGTH).mean(), 7)

    def test_median_of_two(self):
        self.assertEqual(window_of(8, 2).median(), 5)

    def test_median_does_not_depend_on_the_order(self):
        self.assertEqual(window_of(9, 1, 5).median(), 5)


if __name__ == "__main__":
    unittest.main()
